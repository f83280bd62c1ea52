"""flash-attn 2 (package ``flash-attn``): bf16 and fp16 on compute capability 8 and later, GQA.

Its inner functions, which return the lse and take a global one: ``flash_attn/flash_attn_interface.py``, 2.7 to 2.8. Not
run on a GPU so far.
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

MODULE = "flash_attn.flash_attn_interface"
FORWARD, BACKWARD = "_flash_attn_forward", "_flash_attn_backward"
_PLAIN = dict(dropout_p=0.0, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None)


@dataclass(frozen=True)
class FlashAttn2Kernel:
    """See ``protocol.Kernel``."""

    deterministic: bool = False
    name: str = "flash-attn-2"

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        functions = imported(MODULE, FORWARD, BACKWARD)
        if isinstance(functions, str):
            return f"{functions}; pip install 'flash-attn>=2.7' --no-build-isolation"
        return refuses_on_gpu(device, dtype, head_dim, range(8, 100))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        (forward,) = imported(MODULE, FORWARD)
        q, k, v = tokens_first(q, k, v)
        out, lse, *_ = forward(q=q, k=k, v=v, softmax_scale=scale, causal=causal, return_softmax=False, **_PLAIN)
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
            causal=causal,
            deterministic=self.deterministic,
            **_PLAIN,
        )
        return tuple(tokens_first(dq, dk, dv))

    def workspace_bytes(self, batch: int, heads: int, tokens: int, head_dim: int) -> int:
        return fp32_dq_bytes(batch, heads, tokens, head_dim)
