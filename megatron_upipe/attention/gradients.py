"""Gradients of weights that are written piece by piece, each row or column once a micro-batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class WeightGradient:
    """Collects the gradient of one parameter; ``result`` is what ``backward`` returns for it.

    With ``fuse`` and a ``main_grad`` on the parameter, pieces are added to ``main_grad`` in its own precision, as
    Megatron's gradient accumulation fusion does; otherwise they are written into a gradient of the parameter's dtype.
    Megatron-FSDP overwrites ``main_grad`` and has its own place for gradients: never fused there.
    """

    def __init__(self, parameter: Tensor, fuse: bool) -> None:
        self._parameter = parameter
        sharded = hasattr(parameter, "__fsdp_param__")
        self._fused = fuse and not sharded and getattr(parameter, "main_grad", None) is not None
        self._target = parameter.main_grad if self._fused else torch.empty_like(parameter)

    def write_product(self, part: Callable[[Tensor], Tensor], left: Tensor, right: Tensor) -> None:
        """``left^T @ right`` ([tokens, n] and [tokens, k]) is the gradient of the view ``part(parameter)``."""
        self.write(part, _transposed_product(left, right, self._target.dtype))

    def write(self, part: Callable[[Tensor], Tensor], gradient: Tensor) -> None:
        """``part`` maps the parameter to the view that ``gradient`` (any shape of that size) belongs to."""
        view = part(self._target)
        if self._fused:
            view.add_(gradient.view(view.shape))
        else:
            view.copy_(gradient.view(view.shape))

    def result(self) -> Tensor:
        """The gradient; for a fused one a placeholder, after telling DDP that ``main_grad`` has it."""
        if not self._fused:
            return self._target
        parameter = self._parameter
        if not hasattr(parameter, "grad_added_to_main_grad"):
            return None
        parameter.grad_added_to_main_grad = True
        make = torch.zeros if getattr(parameter, "zero_out_wgrad", False) else torch.empty
        return make(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def _transposed_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """``left^T @ right``; in ``dtype`` fp32 not rounded to the inputs' lower precision on the way."""
    if dtype != torch.float32 or left.dtype.itemsize >= dtype.itemsize:
        return left.t() @ right
    if left.is_cuda:
        return torch.mm(left.t(), right, out_dtype=dtype)
    return left.float().t() @ right.float()


class InputGradient:
    """Sum of ``additions`` matrix products [tokens, hidden].

    Summed in the input's dtype up to 8 additions, else in fp32: more roundings to bf16 than that show.
    """

    MOST_IN_LOW_PRECISION = 8

    def __init__(self, like: Tensor, additions: int) -> None:
        self._dtype = like.dtype
        dtype = like.dtype
        if additions > self.MOST_IN_LOW_PRECISION:
            dtype = torch.promote_types(dtype, torch.float32)
        self._sum = torch.zeros(like.shape, dtype=dtype, device=like.device)  # contiguous, whatever x is

    def add(self, gradient: Tensor, rows: Tensor) -> None:
        """Adds ``gradient`` [s*b, n] times ``rows`` [n, hidden]."""
        total = self._sum.view(-1, self._sum.shape[-1])
        if total.dtype == gradient.dtype:
            total.addmm_(gradient, rows)
        else:
            total.add_(gradient @ rows)

    def result(self) -> Tensor:
        return self._sum.to(self._dtype)
