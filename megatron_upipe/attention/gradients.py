"""Gradients that are collected piece by piece and leave their parameter one gradient a micro-batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_upipe.context.merge import MOST_IN_LOW_PRECISION, accumulation_dtype
from megatron_upipe.precision.protocol import Operand, Precision


class WeightGradient:
    """Collects the gradient of one parameter; ``result`` is what ``backward`` returns for it.

    ``write`` is for pieces that come once each, ``add`` and ``add_product`` for sums over tiles, which are kept in fp32
    (``summed``). With ``fuse`` and a ``main_grad`` on the parameter, everything is added to ``main_grad`` in its own
    precision, as Megatron's gradient accumulation fusion does. Megatron-FSDP overwrites ``main_grad`` and has its own
    place for gradients: never fused there.
    """

    def __init__(self, parameter: Tensor, fuse: bool, summed: bool = False) -> None:
        self._parameter = parameter
        sharded = hasattr(parameter, "__fsdp_param__")
        self._fused = fuse and not sharded and getattr(parameter, "main_grad", None) is not None
        precise = accumulation_dtype(parameter.dtype)
        if self._fused and not (summed and parameter.main_grad.dtype.itemsize < precise.itemsize):
            self._target, self._in_place = parameter.main_grad, True
        elif summed:
            self._target, self._in_place = torch.zeros_like(parameter, dtype=precise), False
        else:
            self._target, self._in_place = torch.empty_like(parameter), False

    @property
    def dtype(self) -> torch.dtype:
        """What ``write`` is best given."""
        return self._target.dtype

    def write(self, part: Callable[[Tensor], Tensor], gradient: Tensor) -> None:
        """``part`` maps the parameter to the view that ``gradient`` (any shape of that size) belongs to."""
        view = part(self._target)
        if self._in_place:
            view.add_(gradient.view(view.shape))
        else:
            view.copy_(gradient.view(view.shape))

    def add(self, gradient: Tensor) -> None:
        """Adds a tile's share of the whole gradient."""
        self._target.add_(gradient)

    def add_product(self, precision: Precision, dy: Operand, x: Operand) -> None:
        """Adds dy^T x to the whole gradient [n, k], in place."""
        precision.weight_gradient(dy, x, self._target.dtype, self._target)

    def result(self) -> Tensor | None:
        """The gradient; for a fused one a placeholder, after telling DDP that ``main_grad`` has it."""
        parameter = self._parameter
        if not self._fused:
            return self._target.to(parameter.dtype)
        if not self._in_place:
            parameter.main_grad.add_(self._target)
        if not hasattr(parameter, "grad_added_to_main_grad"):
            return None
        parameter.grad_added_to_main_grad = True
        make = torch.zeros if getattr(parameter, "zero_out_wgrad", False) else torch.empty
        return make(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def flat(tensor: Tensor) -> Tensor:
    """[s, b, n] -> [s*b, n]."""
    return tensor.reshape(-1, tensor.shape[-1])


class InputGradient:
    """Sum of ``additions`` matrix products [s, b, hidden].

    Summed in the input's dtype up to 8 additions, else in fp32.
    """

    def __init__(self, like: Tensor, additions: int, precision: Precision) -> None:
        self._precision = precision
        dtype = like.dtype
        if additions > MOST_IN_LOW_PRECISION:
            dtype = torch.promote_types(dtype, torch.float32)
        self._sum = torch.zeros(like.shape, dtype=dtype, device=like.device)  # contiguous, whatever x is

    def add(self, tokens: slice, dy: Operand, weight: Operand) -> None:
        """Adds dy times the weight's rows to the gradient of some tokens."""
        total = self._sum[tokens]
        self._precision.input_gradient(dy, weight, total.view(-1, total.shape[-1]))

    def result(self) -> Tensor:
        """In the precision of the sum."""
        return self._sum
