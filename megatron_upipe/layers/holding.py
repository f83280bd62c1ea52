"""Whether a node alone holds its gradient, so that it may write over it."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def holders(gradient: Tensor) -> tuple[int, int, int]:
    """How often a gradient is held: autograd hands the same tensor to several nodes, which must not see it change."""
    storage = gradient.untyped_storage()
    return gradient._use_count(), sys.getrefcount(gradient), torch._C._storage_Use_Count(storage._cdata)


class _Probe(torch.autograd.Function):
    """For ``held_alone``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: list) -> Tensor:
        ctx.found = found
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        ctx.found.append(holders(dy))
        return dy.clone(), None


@cache
def held_alone() -> tuple[int, int, int] | None:
    """What ``holders`` says in the backward of a node that alone holds its gradient; None where it cannot be known."""
    if not hasattr(Tensor, "_use_count") or not hasattr(torch._C, "_storage_Use_Count"):  # older torch
        return None
    found: list[tuple[int, int, int]] = []
    with torch.enable_grad():
        leaf = torch.ones(1, requires_grad=True)
        torch.autograd.grad((_Probe.apply(leaf, found) * 2).sum(), leaf)
    return found[0]
