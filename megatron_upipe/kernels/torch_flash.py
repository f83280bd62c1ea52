"""Torch's built-in flash attention on CUDA: in every CUDA build, bf16 and fp16, GQA.

Operations ``aten::_scaled_dot_product_flash_attention`` and its backward. Not run on a GPU so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_upipe.kernels.conventions import fp32_dq_bytes, refuses_on_gpu

_OPS = torch.ops.aten


@dataclass(frozen=True)
class TorchFlashKernel:
    """See ``protocol.Kernel``."""

    name: str = "torch-flash"

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return refuses_on_gpu(device, dtype, head_dim, range(8, 100))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _OPS._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        # None is an undefined tensor: a defined list of sequence lengths, even an empty one, means packed documents
        sequences = (None, None, q.shape[2], k.shape[2])
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
        return _OPS._scaled_dot_product_flash_attention_backward(
            *(dout, q, k, v, out, lse.contiguous(), *sequences, 0.0, causal, state, state), scale=scale
        )

    def workspace_bytes(self, batch: int, heads: int, tokens: int, head_dim: int) -> int:
        return fp32_dq_bytes(batch, heads, tokens, head_dim)
