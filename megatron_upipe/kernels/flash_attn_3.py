"""flash-attn 3: bf16 and fp16 on Hopper, GQA.

Source: ``hopper/flash_attn_interface.py`` of the flash-attention repository.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_upipe.kernels.flash_attn import FlashAttention


@dataclass(frozen=True)
class FlashAttn3Kernel(FlashAttention):
    name = "flash-attn-3"
    module = "flash_attn_interface"
    install = "build it from hopper/ of the flash-attention repository"
    architectures = range(9, 10)

    def call_forward(self, function: Callable, q: Tensor, k: Tensor, v: Tensor, **common: Any) -> tuple:
        return function(q=q, k=k, v=v, **common)

    def call_backward(
        self, function: Callable, gradients: list[Tensor], lse: Tensor, *, causal: bool, **common: Any
    ) -> None:
        dq, dk, dv = gradients
        function(softmax_lse=lse, dq=dq, dk=dk, dv=dv, is_causal=causal, **common)
