"""cuDNN's attention through torch: bf16 and fp16 on compute capability 8 and later, GQA on Hopper and later.

Operations ``aten::_scaled_dot_product_cudnn_attention`` and its backward. Not run on a GPU so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_upipe.kernels.conventions import fp32_dq_bytes, refuses_on_gpu
from megatron_upipe.kernels.one_by_one import backward_one_by_one, forward_one_by_one
from megatron_upipe.kernels.protocol import Documents

_OPS = torch.ops.aten
# Versions of torch differ in whether lse has a last dimension of 1; backward takes what forward has given.
_lse_dimensions = 3


@dataclass(frozen=True)
class TorchCudnnKernel:
    """See ``protocol.Kernel``. Gradients do not repeat bit for bit."""

    name: str = "torch-cudnn"
    windows: bool = False

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        reason = refuses_on_gpu(device, dtype, head_dim, range(9, 13), most=128)
        if reason is None and not torch.backends.cudnn.is_available():
            return "this torch has no cuDNN"
        return reason

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
        if documents is not None:
            return forward_one_by_one(partial(self.forward, causal=causal, scale=scale), q, k, v, documents)
        global _lse_dimensions
        out, lse, *_ = _OPS._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        _lse_dimensions = lse.dim()
        return out, lse.view(q.shape[:3])

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
        if documents is not None:
            one = partial(self.backward, causal=causal, scale=scale)
            return backward_one_by_one(one, dout, q, k, v, out, lse, documents)
        # None is an undefined tensor: no bias and no list of sequence lengths
        sequences = (None, None, q.shape[2], k.shape[2])
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, which there is none of
        lse = lse.contiguous()
        if _lse_dimensions > lse.dim():
            lse = lse.unsqueeze(-1)
        return _OPS._scaled_dot_product_cudnn_attention_backward(
            *(dout, q, k, v, out, lse, seed, seed, None, *sequences, 0.0, causal), scale=scale
        )

    def workspace_bytes(self, batch: int, heads: int, tokens: int, head_dim: int) -> int:
        return fp32_dq_bytes(batch, heads, tokens, head_dim)
