"""Torch's built-in flash attention on CUDA: in every CUDA build, bf16 and fp16, GQA.

Operations ``aten::_scaled_dot_product_flash_attention`` and its backward; for windows and packed documents
``aten::_flash_attention_forward`` and its backward, which take tokens before heads. Not run on a GPU so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_upipe.kernels.conventions import (
    fp32_dq_bytes,
    from_package,
    refuses_on_gpu,
    to_package,
    window_sizes,
)
from megatron_upipe.kernels.protocol import Documents

_OPS = torch.ops.aten


@dataclass(frozen=True)
class TorchFlashKernel:
    """See ``protocol.Kernel``."""

    name: str = "torch-flash"
    windows: bool = True

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return refuses_on_gpu(device, dtype, head_dim, range(8, 100))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float,
        left: int | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor]:
        if left is not None or documents is not None:
            q, k, v = to_package(documents, q, k, v)
            out, lse, *_ = _OPS._flash_attention_forward(
                *(q, k, v, *_sequences(documents, q, k), 0.0, causal, False),
                scale=scale,
                **window_sizes(causal, left),
            )
            return from_package(documents, out)[0], lse if documents is None else lse.unsqueeze(0)
        out, lse, *_ = _OPS._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
        left: int | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
        if left is not None or documents is not None:
            dout, q, k, v, out = to_package(documents, dout, q, k, v, out)
            lse = (lse if documents is None else lse.squeeze(0)).contiguous()
            sequences = _sequences(documents, q, k)
            gradients = _OPS._flash_attention_backward(
                *(dout, q, k, v, out, lse, *sequences, 0.0, causal, state, state),
                scale=scale,
                **window_sizes(causal, left),
            )
            return tuple(from_package(documents, *gradients))
        # None is an undefined tensor: a defined list of sequence lengths, even an empty one, means packed documents
        sequences = (None, None, q.shape[2], k.shape[2])
        return _OPS._scaled_dot_product_flash_attention_backward(
            *(dout, q, k, v, out, lse.contiguous(), *sequences, 0.0, causal, state, state), scale=scale
        )

    def workspace_bytes(self, batch: int, heads: int, tokens: int, head_dim: int) -> int:
        return fp32_dq_bytes(batch, heads, tokens, head_dim)


def _sequences(documents: Documents | None, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Cumulative and longest lengths; None is an undefined tensor."""
    if documents is None:
        return None, None, q.shape[1], k.shape[1]
    lengths = max(documents.queries), max(documents.keys)
    return documents.cumulative_queries, documents.cumulative_keys, *lengths
