"""What the generations of flash-attn share: layout, lse, gradients made by the caller, refusals.

Each generation's file says where its inner functions are, those that return the lse and take a global one, and how they
are called. None has been run on a GPU so far.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_upipe.kernels.conventions import (
    fp32_dq_bytes,
    from_package,
    imported,
    minus_infinity_without_keys,
    refuses_on_gpu,
    to_package,
)
from megatron_upipe.kernels.protocol import Documents


@dataclass(frozen=True)
class FlashAttention(ABC):
    """See ``protocol.Kernel``. The packages take [b, l, n, d], packed [l, n, d] with lse [n, l]; strided but for the
    last axis."""

    deterministic: bool = False
    windows: bool = True

    name: ClassVar[str]
    module: ClassVar[str]
    functions: ClassVar[tuple[str, str]] = ("_flash_attn_forward", "_flash_attn_backward")
    packed_functions: ClassVar[tuple[str, ...]] = ()
    """For packed documents, if they are others."""
    install: ClassVar[str]
    architectures: ClassVar[range]
    """Major compute capabilities."""
    largest_head: ClassVar[int] = 256

    @abstractmethod
    def forward_arguments(self, causal: bool, left: int | None, documents: dict[str, Any]) -> dict[str, Any]:
        """What forward takes besides q, k, v and softmax_scale. ``documents`` are
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k, or nothing."""

    @abstractmethod
    def backward_arguments(
        self, causal: bool, left: int | None, documents: dict[str, Any], lse: Tensor, deterministic: bool
    ) -> dict[str, Any]:
        """What backward takes besides dout, q, k, v, out, dq, dk, dv and softmax_scale."""

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        functions = imported(self.module, *self.functions, *self.packed_functions)
        if isinstance(functions, str):
            return f"{functions}; {self.install}"
        return refuses_on_gpu(device, dtype, head_dim, self.architectures, self.largest_head)

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
        function, _ = self._functions(documents)
        q, k, v = to_package(documents, q, k, v)
        arguments = self.forward_arguments(causal, left, _sequences(documents))
        out, lse, *_ = function(q=q, k=k, v=v, softmax_scale=scale, **arguments)
        lse = lse if documents is None else lse.unsqueeze(0)
        return from_package(documents, out)[0], minus_infinity_without_keys(lse)

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
        _, function = self._functions(documents)
        dout, q, k, v, out = to_package(documents, dout, q, k, v, out)
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        lse = (lse if documents is None else lse.squeeze(0)).contiguous()
        arguments = self.backward_arguments(causal, left, _sequences(documents), lse, self.deterministic)
        function(dout=dout, q=q, k=k, v=v, out=out, dq=dq, dk=dk, dv=dv, softmax_scale=scale, **arguments)
        return tuple(from_package(documents, dq, dk, dv))

    def workspace_bytes(self, batch: int, heads: int, tokens: int, head_dim: int) -> int:
        return fp32_dq_bytes(batch, heads, tokens, head_dim)

    def _functions(self, documents: Documents | None) -> list[Callable]:
        names = self.functions if documents is None else self.packed_functions or self.functions
        return imported(self.module, *names)


def _sequences(documents: Documents | None) -> dict[str, Any]:
    if documents is None:
        return {}
    return dict(
        cu_seqlens_q=documents.cumulative_queries,
        cu_seqlens_k=documents.cumulative_keys,
        max_seqlen_q=max(documents.queries),
        max_seqlen_k=max(documents.keys),
    )
