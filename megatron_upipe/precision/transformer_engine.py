"""The FP8 recipes on a GPU, by TransformerEngine's quantizers and GEMMs called as functions.

Only recipes whose scales come from the tensor itself: backward then computes q, k and v again bit for bit. Written
against TransformerEngine 2.20; not run on a GPU so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_upipe.precision.protocol import Operand
from megatron_upipe.precision.recipes import Fp8Recipe


@dataclass(frozen=True)
class TransformerEnginePrecision:
    """See ``protocol.Precision``. ``dtype``: of the parameters and results."""

    recipe: Fp8Recipe
    dtype: torch.dtype
    device: torch.device
    quantises: ClassVar[bool] = True

    @property
    def alignment(self) -> int:
        return self.recipe.alignment

    def describe(self) -> str:
        return f"{self.recipe.describe()} by TransformerEngine"

    def share(self, parameter: Tensor) -> tuple[Tensor, Any]:
        if self.recipe.name != "tensorwise":
            return parameter, None  # scales of its pieces are the same as those of the whole
        whole = self._quantised(parameter, self._quantizers.weight, rowwise=True, columnwise=False)
        return whole._data.view(parameter.shape), whole

    def piece(self, data: Tensor, shared: Any, like: Tensor, backward: bool) -> Operand:
        if shared is None:
            return self._quantised(data, self._quantizers.weight, rowwise=not backward, columnwise=backward)
        from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

        piece = Float8TensorStorage(
            data=data.contiguous(),
            fp8_scale_inv=shared._scale_inv,
            fp8_dtype=shared._fp8_dtype,
            fake_dtype=self.dtype,
            quantizer=self._quantizers.weight,
        )
        if backward:  # a transpose where the GPU's GEMMs need one
            piece.update_usage(rowwise_usage=False, columnwise_usage=True)
        return piece

    def tokens(self, x: Tensor, forward: bool, backward: bool) -> Operand:
        return self._quantised(x, self._quantizers.tokens, forward, backward)

    def gradient(self, dy: Tensor, forward: bool = True, backward: bool = True) -> Operand:
        return self._quantised(dy, self._quantizers.gradient, forward, backward)

    def product(self, x: Operand, w: Operand, bias: Tensor | None = None) -> Tensor:
        return self._gemm("fprop", w, x, layout="TN", out_dtype=self.dtype, bias=bias)

    def input_gradient(self, dy: Operand, w: Operand, total: Tensor | None = None) -> Tensor:
        return self._gemm("dgrad", w, dy, layout="NN", grad=True, **self._into(total, self.dtype))

    def weight_gradient(self, dy: Operand, x: Operand, dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
        return self._gemm("wgrad", x, dy, layout="NT", grad=True, **self._into(total, dtype))

    def _into(self, total: Tensor | None, dtype: torch.dtype) -> dict[str, Any]:
        if total is None:
            return dict(out_dtype=dtype)
        return dict(out=total, accumulate=True, out_dtype=total.dtype)

    def _gemm(self, which: str, a: Operand, b: Operand, **arguments: Any) -> Tensor:
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        parameters = getattr(self._te_recipe, f"fp8_gemm_{which}", None)
        split = which != "fprop" if parameters is None else parameters.use_split_accumulator
        return general_gemm(a, b, use_split_accumulator=split, **arguments)[0]

    def _quantised(self, tensor: Tensor, quantizer: Any, rowwise: bool, columnwise: bool) -> Operand:
        """TransformerEngine's casts write rows in any case; those that nobody reads are dropped."""
        quantizer = quantizer.copy()
        quantizer.set_usage(rowwise=True, columnwise=columnwise)
        quantised = quantizer(tensor.detach().contiguous())
        if not rowwise:
            quantised.update_usage(rowwise_usage=False, columnwise_usage=True)
        return quantised

    @cached_property
    def _te_recipe(self) -> Any:
        from transformer_engine.common import recipe

        kinds = {"tensorwise": "Float8CurrentScaling", "blockwise": "Float8BlockScaling", "mxfp8": "MXFP8BlockScaling"}
        form = recipe.Format.HYBRID if self.recipe.hybrid else recipe.Format.E4M3
        return getattr(recipe, kinds[self.recipe.name])(fp8_format=form)

    @cached_property
    def _quantizers(self) -> _Quantizers:
        from transformer_engine.pytorch.quantization import RecipeState

        # in the places that TransformerEngine's recipes give them: input, weight; gradient of the output
        forward, backward = (
            RecipeState.create(self._te_recipe, mode=mode, num_quantizers=n, device=self.device).make_quantizers()
            for mode, n in (("forward", 2), ("backward", 1))
        )
        for quantizer in (*forward, *backward):
            quantizer.internal = True  # plain holders of data instead of tensor subclasses
        return _Quantizers(*forward, *backward)


@dataclass(frozen=True)
class _Quantizers:
    tokens: Any
    weight: Any
    gradient: Any
