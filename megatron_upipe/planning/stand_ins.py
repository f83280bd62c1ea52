"""What takes the place of GPU kernels in a simulation: the same tensors come and go, nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_upipe.kernels.protocol import Kernel


@dataclass
class Runs:
    """How often blocks of attention ran forward, and their FLOPs: two products forward, five backward, half under the
    mask."""

    forward: int = 0
    forward_flops: float = 0.0
    backward_flops: float = 0.0


@dataclass(frozen=True)
class SimulatedKernel:
    """See ``kernels.protocol.Kernel``: results and the workspace of ``real``."""

    real: Kernel
    runs: Runs = field(default_factory=Runs)

    @property
    def name(self) -> str:
        return self.real.name

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        self.runs.forward += 1
        self.runs.forward_flops += 2 * _product_flops(q, k, causal)
        return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.runs.backward_flops += 5 * _product_flops(q, k, causal)
        b, heads, tokens, head_dim = q.shape
        gradients = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        workspace = q.new_empty(self.workspace_bytes(b, heads, tokens, head_dim), dtype=torch.uint8)
        del workspace
        return gradients

    def workspace_bytes(self, batch: int, heads: int, tokens: int, head_dim: int) -> int:
        return self.real.workspace_bytes(batch, heads, tokens, head_dim)


def _product_flops(q: Tensor, k: Tensor, causal: bool) -> float:
    b, heads, tokens, head_dim = q.shape
    return 2.0 * b * heads * tokens * k.shape[2] * head_dim / (2 if causal else 1)


class FusedNorm(torch.nn.Module):
    """A norm as GPU kernels compute it: keeps its input and one number a row; Megatron's torch norm on a CPU keeps
    several copies in fp32."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight

    def forward(self, x: Tensor) -> Tensor:
        return _FusedNormFunction.apply(x, self.weight)


class _FusedNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
