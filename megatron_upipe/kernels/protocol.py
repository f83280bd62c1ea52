"""What a block-attention backend must do."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Kernel(Protocol):
    """Attention of a block of queries to a block of keys, dense or causal, with grouped KV heads.

    q, dout, out: [b, m, l, d]; k, v: [b, c, l', d] with m a multiple of c: query head i uses KV head i // (m/c).
    lse: [b, m, l], natural log of the summed exponentials of ``scale * q k^T``, fp32 (fp64 for fp64 inputs); a row
    without keys has out 0 and lse -inf. A causal block is square. Inputs may be strided views; results are owned by the
    caller. Never collective.
    """

    name: str
    """For ``--upipe-attention-backend``."""

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why this backend cannot serve such inputs; None if it can."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """out and lse of the block."""
        ...

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of the block; ``out`` and ``lse`` are *global*: over all blocks of keys, this one included."""
        ...

    def workspace_bytes(self, batch: int, heads: int, tokens: int, head_dim: int) -> int:
        """What backward allocates and frees inside for such queries, unseen by torch's counting of tensors."""
        ...
