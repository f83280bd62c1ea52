"""flash-attn 4 (package ``flash-attn-4``, CuTe DSL): bf16 and fp16 on Hopper and Blackwell, GQA.

Source: ``flash_attn/cute/interface.py`` of the flash-attention repository.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_upipe.kernels.flash_attn import FlashAttention


@dataclass(frozen=True)
class FlashAttn4Kernel(FlashAttention):
    name = "flash-attn-4"
    module = "flash_attn.cute.interface"
    functions = ("_flash_attn_fwd", "_flash_attn_bwd")
    install = "pip install flash-attn-4"
    architectures = range(9, 13)
    largest_head = 128

    def forward_arguments(self, causal: bool, left: int | None, documents: dict[str, Any]) -> dict[str, Any]:
        return dict(causal=causal, return_lse=True, **_window(causal, left), **documents)

    def backward_arguments(
        self, causal: bool, left: int | None, documents: dict[str, Any], lse: Tensor, deterministic: bool
    ) -> dict[str, Any]:
        return dict(causal=causal, lse=lse, deterministic=deterministic, **_window(causal, left), **documents)


def _window(causal: bool, left: int | None) -> dict[str, Any]:
    if left is None:
        return {}
    return dict(window_size_left=left, window_size_right=0 if causal else None)
