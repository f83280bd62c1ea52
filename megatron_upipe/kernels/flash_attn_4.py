"""flash-attn 4 (package ``flash-attn-4``, CuTe DSL): bf16 and fp16 on Hopper and Blackwell, GQA.

Its inner functions: ``flash_attn/cute/interface.py``. Not run on a GPU so far.
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

MODULE = "flash_attn.cute.interface"
FORWARD, BACKWARD = "_flash_attn_fwd", "_flash_attn_bwd"


@dataclass(frozen=True)
class FlashAttn4Kernel:
    """See ``protocol.Kernel``."""

    deterministic: bool = False
    name: str = "flash-attn-4"

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        functions = imported(MODULE, FORWARD, BACKWARD)
        if isinstance(functions, str):
            return f"{functions}; pip install flash-attn-4"
        return refuses_on_gpu(device, dtype, head_dim, range(9, 13), most=128)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        (forward,) = imported(MODULE, FORWARD)
        q, k, v = tokens_first(q, k, v)
        out, lse, *_ = forward(q=q, k=k, v=v, softmax_scale=scale, causal=causal, return_lse=True)
        return out.transpose(1, 2), minus_infinity_without_keys(lse)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        (backward,) = imported(MODULE, BACKWARD)
        dout, q, k, v, out = (t.contiguous() for t in tokens_first(dout, q, k, v, out))
        dq, dk, dv, *_ = backward(
            q=q,
            k=k,
            v=v,
            out=out,
            dout=dout,
            lse=lse.contiguous(),
            softmax_scale=scale,
            causal=causal,
            deterministic=self.deterministic,
        )
        return tuple(tokens_first(dq, dk, dv))

    def workspace_bytes(self, batch: int, heads: int, tokens: int, head_dim: int) -> int:
        return fp32_dq_bytes(batch, heads, tokens, head_dim)
