"""flash-attn 3: bf16 and fp16 on Hopper, GQA.

Source: ``hopper/flash_attn_interface.py`` of the flash-attention repository.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_upipe.kernels.conventions import window_sizes
from megatron_upipe.kernels.flash_attn import FlashAttention


@dataclass(frozen=True)
class FlashAttn3Kernel(FlashAttention):
    name = "flash-attn-3"
    module = "flash_attn_interface"
    install = "build it from hopper/ of the flash-attention repository"
    architectures = range(9, 10)

    def forward_arguments(self, causal: bool, left: int | None, documents: dict[str, Any]) -> dict[str, Any]:
        return dict(causal=causal, **window_sizes(causal, left), **documents)

    def backward_arguments(
        self, causal: bool, left: int | None, documents: dict[str, Any], lse: Tensor, deterministic: bool
    ) -> dict[str, Any]:
        common = dict(softmax_lse=lse, is_causal=causal, deterministic=deterministic)
        return {**common, **window_sizes(causal, left), **documents}
