"""What a block-attention backend must do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Documents:
    """Lengths, none of them 0, of documents that lie one after the other in q and in k and v; micro-batch 1.

    The tensors are cumulative lengths in int32 on the device, from 0 to l and l'.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    cumulative_queries: Tensor
    cumulative_keys: Tensor

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int], device: torch.device) -> Documents:
        cumulative = [torch.tensor([0, *accumulate(n)], dtype=torch.int32).to(device) for n in (queries, keys)]
        return cls(tuple(queries), tuple(keys), *cumulative)


class Kernel(Protocol):
    """Attention of a block of queries to a block of keys, with grouped KV heads.

    q, dout, out: [b, m, l, d]; k, v: [b, c, l', d] with m a multiple of c: query head i uses KV head i // (m/c).
    lse: [b, m, l], natural log of the summed exponentials of ``scale * q k^T``, fp32 (fp64 for fp64 inputs); a row
    without keys has out 0 and lse -inf. Inputs may be strided views; results are owned by the caller. Never collective.

    ``causal``: a square of which query i sees keys up to i. ``left``: query i sees keys from i + (l' - l) - left on;
    None or all of them: no window. With ``documents`` all this holds within each of them. FP8 kernels take neither.
    """

    name: str
    """For ``--upipe-attention-backend``."""
    windows: bool
    """Whether it takes ``left``."""

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why this backend cannot serve such inputs; None if it can."""
        ...

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
        left: int | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of the block; ``out`` and ``lse`` are *global*: over all blocks of keys, this one included."""
        ...

    def workspace_bytes(self, batch: int, heads: int, tokens: int, head_dim: int) -> int:
        """What backward allocates and frees inside for such queries, unseen by torch's counting of tensors."""
        ...
