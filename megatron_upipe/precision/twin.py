"""The FP8 recipes in plain torch, on any device: the same scales and roundings, products in fp64.

For tests and for training on a CPU. Scales as TransformerEngine makes them: tensorwise, one of largest magnitude over
the tensor; blockwise, powers of two over 128 values of a row (of a column where the product runs over tokens), 128 x
128 of a weight; mxfp8, powers of two over 32 values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_upipe.precision.recipes import Fp8Recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Quantised:
    """``data`` [r, c] in FP8 times ``scale_inv``: one fp32 number, or one for each block of ``block`` values."""

    data: Tensor
    scale_inv: Tensor
    block: tuple[int, int] | None = None

    def values(self) -> Tensor:
        """In fp64, for a product; a common scale is left out, so that sums of products are exact."""
        values = self.data.double()
        if self.block is None:
            return values
        rows, columns = self.data.shape
        scale = self.scale_inv.double()
        scale = scale.repeat_interleave(self.block[0], 0)[:rows].repeat_interleave(self.block[1], 1)[:, :columns]
        return values.mul_(scale)

    def factor(self) -> Tensor:
        """What ``values`` leaves out."""
        return self.scale_inv.double() if self.block is None else self.scale_inv.new_ones((), dtype=torch.float64)


def quantise_tensor(x: Tensor, dtype: torch.dtype) -> Quantised:
    """Current scaling: the largest magnitude becomes the largest number of ``dtype``."""
    scale = _scale(x.abs().amax().float().view(1), dtype, x.dtype)
    return Quantised((x.float() * scale).to(dtype), scale.reciprocal())


def quantise_blocks(x: Tensor, dtype: torch.dtype, block: tuple[int, int], mx: bool) -> Quantised:
    """A scale for each block of [r, c], a power of two: rounded down (blockwise), or as MXFP8 does (``mx``)."""
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.view(-1, block[0], padded.shape[1] // block[1], block[1])
    amax = blocks.abs().amax((1, 3))
    if mx:
        mantissa, exponent = torch.frexp(amax * torch.tensor(torch.finfo(dtype).max).reciprocal())
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)
        scale = torch.ldexp(torch.ones_like(amax), -exponent)
        scale = torch.where(amax.isfinite(), scale, torch.nan)  # else infinity would become the largest number
    else:
        _, exponent = torch.frexp(_scale(amax, dtype, x.dtype))
        scale = torch.ldexp(torch.ones_like(amax), exponent - 1)
    data = (blocks * scale[:, None, :, None]).view(padded.shape)[:rows, :columns].to(dtype)
    return Quantised(data, scale.reciprocal(), block)


def _scale(amax: Tensor, dtype: torch.dtype, source: torch.dtype) -> Tensor:
    scale = torch.div(torch.finfo(dtype).max, amax)  # the operator / would multiply by a rounded reciprocal
    largest = min(torch.finfo(source).max, torch.finfo(torch.float32).max)
    scale = torch.where(scale == torch.inf, largest, scale)  # amax next to 0
    return torch.where(amax == 0, 1.0, scale)


@dataclass(frozen=True)
class TwinOperand:
    """``across``: scaled along the features, for products over them; ``along``: along the tokens, or a weight's
    rows. ``dtype``: of the tensor that it came from."""

    across: Quantised | None
    along: Quantised | None
    dtype: torch.dtype


@dataclass(frozen=True)
class TwinPrecision:
    """See ``protocol.Precision``."""

    recipe: Fp8Recipe
    quantises: ClassVar[bool] = True

    @property
    def alignment(self) -> int:
        return self.recipe.alignment

    def describe(self) -> str:
        return f"{self.recipe.describe()}, computed by its twin in plain torch"

    def share(self, parameter: Tensor) -> tuple[Tensor, Any]:
        if self.recipe.name != "tensorwise":
            return parameter, None  # scales of its pieces are the same as those of the whole
        whole = quantise_tensor(parameter.detach(), E4M3)
        return whole.data.view(torch.uint8), whole

    def piece(self, data: Tensor, shared: Any, like: Tensor, backward: bool) -> TwinOperand:
        if shared is not None:
            piece = replace(shared, data=data.view(E4M3))
            return TwinOperand(piece, piece, like.dtype)
        if self.recipe.name == "blockwise":
            piece = quantise_blocks(data.detach(), E4M3, (128, 128), mx=False)
            return TwinOperand(piece, piece, like.dtype)
        return self._operand(data.detach(), E4M3, not backward, backward)

    def tokens(self, x: Tensor, forward: bool, backward: bool) -> TwinOperand:
        return self._operand(x.detach(), E4M3, forward, backward)

    def gradient(self, dy: Tensor, forward: bool = True, backward: bool = True) -> TwinOperand:
        return self._operand(dy, E5M2 if self.recipe.hybrid else E4M3, forward, backward)

    def product(self, x: TwinOperand, w: TwinOperand, bias: Tensor | None = None) -> Tensor:
        y = _product(x.across, w.across, lambda a, b: a @ b.t())
        return (y if bias is None else y + bias).to(x.dtype)

    def input_gradient(self, dy: TwinOperand, w: TwinOperand, total: Tensor | None = None) -> Tensor:
        return _added(_product(dy.across, w.along, lambda a, b: a @ b), dy.dtype, total)

    def weight_gradient(
        self, dy: TwinOperand, x: TwinOperand, dtype: torch.dtype, total: Tensor | None = None
    ) -> Tensor:
        return _added(_product(dy.along, x.along, lambda a, b: a.t() @ b), dtype, total)

    def _operand(self, x: Tensor, dtype: torch.dtype, across: bool, along: bool) -> TwinOperand:
        if self.recipe.name == "tensorwise":
            both = quantise_tensor(x, dtype)
            return TwinOperand(both if across else None, both if along else None, x.dtype)
        mx = self.recipe.name == "mxfp8"
        length = 32 if mx else 128
        blocks = [
            quantise_blocks(x, dtype, block, mx) if wanted else None
            for block, wanted in (((1, length), across), ((length, 1), along))
        ]
        return TwinOperand(*blocks, x.dtype)


def _product(left: Quantised, right: Quantised, multiply: Any) -> Tensor:
    return multiply(left.values(), right.values()).mul_(left.factor() * right.factor())


def _added(product: Tensor, dtype: torch.dtype, total: Tensor | None) -> Tensor:
    return product.to(dtype) if total is None else total.copy_(total.double() + product)
