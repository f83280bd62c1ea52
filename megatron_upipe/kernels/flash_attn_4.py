"""flash-attn 4 (package ``flash-attn-4``, CuTe DSL): bf16 and fp16 on Hopper and Blackwell, GQA.

Source: ``flash_attn/cute/interface.py`` of the flash-attention repository.
"""

from __future__ import annotations

from collections.abc import Callable
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

    def call_forward(self, function: Callable, q: Tensor, k: Tensor, v: Tensor, **common: Any) -> tuple:
        return function(q=q, k=k, v=v, return_lse=True, **common)

    def call_backward(self, function: Callable, gradients: list[Tensor], lse: Tensor, **common: Any) -> None:
        dq, dk, dv = gradients
        function(lse=lse, dq=dq, dk=dk, dv=dv, **common)
