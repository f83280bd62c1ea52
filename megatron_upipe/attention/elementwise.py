"""Norms and RoPE: applied with parameters of choice, and their backward piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_upipe.context.merge import accumulation_dtype


def apply_norm(norm: torch.nn.Module | None, t: Tensor, parameters: Sequence[Tensor] | None) -> Tensor:
    """``norm(t)``, with ``parameters`` in the place of its own if given."""
    if norm is None:
        return t
    if not parameters:
        return norm(t)
    names = [name for name, _ in norm.named_parameters()]
    return torch.func.functional_call(norm, dict(zip(names, parameters, strict=True)), (t,))


class ElementwiseGradient:
    """Backward of functions that share ``parameters``; their gradients are summed over all pieces.

    In accumulation dtype, so that nothing is rounded at every piece.
    """

    def __init__(self, parameters: Sequence[Tensor], needs: Sequence[bool]) -> None:
        self._parameters = [
            p.detach().to(accumulation_dtype(p.dtype), copy=True).requires_grad_(needed)
            for p, needed in zip(parameters, needs, strict=True)
        ]

    def through(self, function: Callable, raw: Tensor | None, gradient: Tensor) -> Tensor:
        """Gradient of the input of ``function(input, parameters)``.

        ``raw`` is the input, or None for a linear function, whose backward is the same everywhere.
        """
        raw = (gradient if raw is None else raw).detach().requires_grad_()
        with torch.enable_grad():
            if self._parameters:
                output = function(raw.to(accumulation_dtype(raw.dtype)), self._parameters)
            else:
                output = function(raw, None)
        wanted = [p for p in self._parameters if p.requires_grad]
        draw, *rest = torch.autograd.grad(output, (raw, *wanted), gradient.to(output.dtype), allow_unused=True)
        for parameter, part in zip(wanted, rest, strict=True):
            if part is not None:
                parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)
        return draw

    def result(self) -> list[Tensor | None]:
        """Gradients of the parameters, in their order."""
        return [p.grad for p in self._parameters]
