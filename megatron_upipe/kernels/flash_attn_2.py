"""flash-attn 2 (package ``flash-attn``), 2.7 to 2.8: bf16 and fp16 on compute capability 8 and later, GQA.

Source: ``flash_attn/flash_attn_interface.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_upipe.kernels.conventions import window_sizes
from megatron_upipe.kernels.flash_attn import FlashAttention

_PLAIN = dict(dropout_p=0.0, softcap=0.0, alibi_slopes=None)


@dataclass(frozen=True)
class FlashAttn2Kernel(FlashAttention):
    name = "flash-attn-2"
    module = "flash_attn.flash_attn_interface"
    packed_functions = ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward")
    install = "pip install 'flash-attn>=2.7' --no-build-isolation"
    architectures = range(8, 100)

    def forward_arguments(self, causal: bool, left: int | None, documents: dict[str, Any]) -> dict[str, Any]:
        return dict(return_softmax=False, causal=causal, **window_sizes(causal, left), **documents, **_PLAIN)

    def backward_arguments(
        self, causal: bool, left: int | None, documents: dict[str, Any], lse: Tensor, deterministic: bool
    ) -> dict[str, Any]:
        return dict(
            softmax_lse=lse,
            deterministic=deterministic,
            causal=causal,
            **window_sizes(causal, left),
            **documents,
            **_PLAIN,
        )
