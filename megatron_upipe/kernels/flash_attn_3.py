"""flash-attn 3 (``hopper/`` of the flash-attention repository): bf16 and fp16 on Hopper, GQA.

Its inner functions: ``flash_attn_interface.py`` of that package. Not run on a GPU so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_upipe.kernels.conventions import (
    fp32_dq_bytes,
    imported,
    minus_infinity_without_keys,
    refuses_on_gpu,
    tokens_first,
)

MODULE = "flash_attn_interface"
FORWARD, BACKWARD = "_flash_attn_forward", "_flash_attn_backward"


@dataclass(frozen=True)
class FlashAttn3Kernel:
    """See ``protocol.Kernel``."""

    deterministic: bool = False
    name: str = "flash-attn-3"

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        functions = imported(MODULE, FORWARD, BACKWARD)
        if isinstance(functions, str):
            return f"{functions}; build it from hopper/ of the flash-attention repository"
        return refuses_on_gpu(device, dtype, head_dim, range(9, 10))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        (forward,) = imported(MODULE, FORWARD)
        q, k, v = tokens_first(q, k, v)
        out, lse, *_ = forward(q=q, k=k, v=v, softmax_scale=scale, causal=causal)
        return out.transpose(1, 2), minus_infinity_without_keys(lse)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        (backward,) = imported(MODULE, BACKWARD)
        dout, q, k, v, out = tokens_first(dout, q, k, v, out)
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        backward(
            dout=dout,
            q=q,
            k=k,
            v=v,
            out=out,
            softmax_lse=lse.contiguous(),
            dq=dq,
            dk=dk,
            dv=dv,
            softmax_scale=scale,
            is_causal=causal,
            deterministic=self.deterministic,
        )
        return tuple(tokens_first(dq, dk, dv))

    def workspace_bytes(self, batch: int, heads: int, tokens: int, head_dim: int) -> int:
        return fp32_dq_bytes(batch, heads, tokens, head_dim)
