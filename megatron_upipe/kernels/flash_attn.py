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
    imported,
    minus_infinity_without_keys,
    refuses_on_gpu,
    tokens_first,
)


@dataclass(frozen=True)
class FlashAttention(ABC):
    """See ``protocol.Kernel``. The packages take [b, l, n, d], strided but for the last axis."""

    deterministic: bool = False

    name: ClassVar[str]
    module: ClassVar[str]
    functions: ClassVar[tuple[str, str]] = ("_flash_attn_forward", "_flash_attn_backward")
    install: ClassVar[str]
    architectures: ClassVar[range]
    """Major compute capabilities."""
    largest_head: ClassVar[int] = 256

    @abstractmethod
    def call_forward(self, function: Callable, q: Tensor, k: Tensor, v: Tensor, **common: Any) -> tuple:
        """out and lse first; ``common`` are softmax_scale and causal."""

    @abstractmethod
    def call_backward(self, function: Callable, gradients: list[Tensor], lse: Tensor, **common: Any) -> None:
        """Fills ``gradients`` (dq, dk, dv); ``common`` are also dout, q, k, v, out and deterministic."""

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        functions = imported(self.module, *self.functions)
        if isinstance(functions, str):
            return f"{functions}; {self.install}"
        return refuses_on_gpu(device, dtype, head_dim, self.architectures, self.largest_head)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        function, _ = imported(self.module, *self.functions)
        out, lse, *_ = self.call_forward(function, *tokens_first(q, k, v), softmax_scale=scale, causal=causal)
        return out.transpose(1, 2), minus_infinity_without_keys(lse)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        _, function = imported(self.module, *self.functions)
        dout, q, k, v, out = tokens_first(dout, q, k, v, out)
        gradients = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)]
        common = dict(softmax_scale=scale, causal=causal, deterministic=self.deterministic)
        self.call_backward(function, gradients, lse.contiguous(), dout=dout, q=q, k=k, v=v, out=out, **common)
        return tuple(tokens_first(*gradients))

    def workspace_bytes(self, batch: int, heads: int, tokens: int, head_dim: int) -> int:
        return fp32_dq_bytes(batch, heads, tokens, head_dim)
