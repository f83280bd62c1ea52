"""Torch's CPU flash attention: linear memory, GQA, fp64 to bf16.

The operation is ``aten::_scaled_dot_product_flash_attention_for_cpu``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_OPS = torch.ops.aten
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TorchCpuKernel:
    """See ``protocol.Kernel``."""

    name: str = "torch-cpu"

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type != "cpu":
            return "needs CPU tensors"
        return None if dtype in _DTYPES else f"{dtype} is not supported"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        return _OPS._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _OPS._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, scale=scale
        )

    def workspace_bytes(self, batch: int, heads: int, tokens: int, head_dim: int) -> int:
        return 0
