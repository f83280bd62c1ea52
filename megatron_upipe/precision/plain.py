"""Products in the precision of the parameters, summed in fp32 by the GEMMs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_upipe.precision.protocol import Operand

BLOCK = 4096  # rows of a product in higher precision that exist at a time


@dataclass(frozen=True)
class PlainPrecision:
    """See ``protocol.Precision``. Operands are the tensors themselves."""

    quantises: ClassVar[bool] = False
    alignment: ClassVar[int] = 1

    def describe(self) -> str:
        return "that of the parameters"

    def share(self, parameter: Tensor) -> tuple[Tensor, Any]:
        return parameter, None

    def piece(self, data: Tensor, shared: Any, like: Tensor, backward: bool) -> Operand:
        return data

    def tokens(self, x: Tensor, forward: bool, backward: bool) -> Operand:
        return x

    def gradient(self, dy: Tensor, forward: bool = True, backward: bool = True) -> Operand:
        return dy

    def product(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, w, bias)

    def input_gradient(self, dy: Tensor, w: Tensor, total: Tensor | None = None) -> Tensor:
        if total is None:
            return dy @ w
        if total.dtype == dy.dtype:
            return total.addmm_(dy, w)
        for start in range(0, total.shape[0], BLOCK):
            total[start : start + BLOCK].add_(dy[start : start + BLOCK] @ w)
        return total

    def weight_gradient(self, dy: Tensor, x: Tensor, dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
        if total is None:
            return _transposed_product(dy, x, dtype)
        if total.dtype == dy.dtype:
            return total.addmm_(dy.t(), x)
        for start in range(0, total.shape[0], BLOCK):
            rows = slice(start, start + BLOCK)
            total[rows].add_(_transposed_product(dy[:, rows], x, dtype))
        return total


PLAIN = PlainPrecision()


def _transposed_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """``left^T @ right``; in ``dtype`` fp32 not rounded to the inputs' lower precision on the way."""
    if dtype != torch.float32 or left.dtype.itemsize >= dtype.itemsize:
        return left.t() @ right
    if left.is_cuda:
        return torch.mm(left.t(), right, out_dtype=dtype)
    total = torch.zeros(left.shape[1], right.shape[1], dtype=dtype, device=left.device)
    for start in range(0, left.shape[0], BLOCK):  # a CPU has no such product; copies in fp32 as small as may be
        rows = slice(start, start + BLOCK)
        total.addmm_(left[rows].float().t(), right[rows].float())
    return total
