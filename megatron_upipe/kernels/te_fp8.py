"""FP8 attention by TransformerEngine: forward only on Hopper, forward and backward as MXFP8 on Blackwell.

Hopper's kernel takes and gives per-tensor FP8. Scales without history: of q, k and v from their largest magnitude; of
the weights of the softmax, which are at most 1, fixed; of out from v, whose average it is. Its gradient kernel would
need scales from earlier steps, hence backward is that of another kernel in 16 bits. Not run on a GPU so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megatron_upipe.kernels.conventions import fp32_dq_bytes, refuses_on_gpu, tokens_first
from megatron_upipe.kernels.protocol import Kernel
from megatron_upipe.kernels.te_fused import contiguous, fused_backward, fused_forward
from megatron_upipe.precision.te_package import refuses_te

SOFTMAX_SCALE = 256.0  # of weights up to 1; a power of two
OUT_LARGEST = 400.0  # below E4M3's 448: rounded weights may add up to a little more than 1


@dataclass(frozen=True)
class BackwardIn16Bits:
    """The half of a kernel whose backward is that of ``backward_kernel``, from q, k and v as they were."""

    backward_kernel: Kernel

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.backward_kernel.backward(dout, q, k, v, out, lse, causal, scale)

    def workspace_bytes(self, batch: int, heads: int, tokens: int, head_dim: int) -> int:
        return self.backward_kernel.workspace_bytes(batch, heads, tokens, head_dim)


@dataclass(frozen=True)
class TransformerEngineFp8Forward(BackwardIn16Bits):
    """See ``protocol.Kernel``."""

    name: str = "transformer-engine-fp8"

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return refuses_te() or refuses_on_gpu(device, dtype, head_dim, range(9, 10), most=256, multiple=16)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        tensors = import_module("transformer_engine.pytorch.tensor.float8_tensor")
        e4m3 = import_module("transformer_engine.pytorch.constants").DType.kFloat8E4M3
        q, k, v = contiguous(None, q, k, v)
        largest = v.abs().amax().float().clamp(min=1e-30).view(1)

        def fixed(factor: Tensor) -> Any:
            return tensors.Float8Quantizer(factor, torch.zeros_like(factor), e4m3, rowwise=True, columnwise=False)

        current = tensors.Float8CurrentScalingQuantizer(e4m3, q.device, rowwise=True, columnwise=False)
        out, lse = fused_forward(
            [current(t) for t in (q, k, v)],
            (q, k, v),
            "FP8",
            causal,
            scale,
            s_quantizer=fixed(torch.full_like(largest, SOFTMAX_SCALE)),
            o_quantizer=fixed(OUT_LARGEST / largest),
        )
        return out.dequantize(dtype=q.dtype).transpose(1, 2), lse


@dataclass(frozen=True)
class TransformerEngineMxfp8:
    """See ``protocol.Kernel``. Blocks of V and of the gradients span 32 tokens: under a causal mask scales carry a
    little of later tokens (TransformerEngine issue 3248). For sizes see ``checks.check_fp8_attention``."""

    name: str = "transformer-engine-mxfp8"
    deterministic: bool = False

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return refuses_te() or refuses_on_gpu(device, dtype, head_dim, range(10, 12), most=128, multiple=32)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = contiguous(None, q, k, v)
        quantised, formats = _quantised(q, k, v, backward=False)
        out, lse = fused_forward(quantised, (q, k, v), "FP8", causal, scale, **formats)
        return out.transpose(1, 2), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = contiguous(None, dout, q, k, v, out)
        quantised, formats = _quantised(q, k, v, backward=True)
        gradient = _quantizer(rowwise=True, columnwise=True)
        (dout_fp8,), do_format = _attention_utils().mxfp8_quantize_fast_path([(dout, gradient)], "bshd")
        gradients = fused_backward(
            dout_fp8,
            quantised,
            out,
            lse,
            k,
            "FP8",
            causal,
            scale,
            further=(dout,),  # in 16 bits, too
            do_scale_inv_format=do_format,
            deterministic=self.deterministic,
            **formats,
        )
        return tuple(tokens_first(*gradients))

    def workspace_bytes(self, batch: int, heads: int, tokens: int, head_dim: int) -> int:
        return fp32_dq_bytes(batch, heads, tokens, head_dim)


def _attention_utils() -> Any:
    return import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")


def _quantizer(rowwise: bool, columnwise: bool) -> Any:
    dtype = import_module("transformer_engine.pytorch.constants").DType.kFloat8E4M3
    tensors = import_module("transformer_engine.pytorch.tensor.mxfp8_tensor")
    return tensors.MXFP8Quantizer(dtype, rowwise=rowwise, columnwise=columnwise)


def _quantised(q: Tensor, k: Tensor, v: Tensor, backward: bool) -> tuple[tuple, dict[str, Any]]:
    quantizer = _quantizer(rowwise=True, columnwise=True)
    *quantised, _, scales = _attention_utils().combine_and_quantize(
        "bshd_bshd_bshd", q, k, v, quantizer, used_in_forward=not backward, used_in_backward=backward
    )
    return tuple(quantised), dict(qkv_scale_inv_format=scales)
