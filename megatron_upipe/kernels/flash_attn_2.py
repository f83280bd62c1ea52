"""flash-attn 2 (package ``flash-attn``), 2.7 to 2.8: bf16 and fp16 on compute capability 8 and later, GQA.

Source: ``flash_attn/flash_attn_interface.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_upipe.kernels.flash_attn import FlashAttention

_PLAIN = dict(dropout_p=0.0, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None)


@dataclass(frozen=True)
class FlashAttn2Kernel(FlashAttention):
    name = "flash-attn-2"
    module = "flash_attn.flash_attn_interface"
    install = "pip install 'flash-attn>=2.7' --no-build-isolation"
    architectures = range(8, 100)

    def call_forward(self, function: Callable, q: Tensor, k: Tensor, v: Tensor, **common: Any) -> tuple:
        return function(q=q, k=k, v=v, return_softmax=False, **common, **_PLAIN)

    def call_backward(self, function: Callable, gradients: list[Tensor], lse: Tensor, **common: Any) -> None:
        dq, dk, dv = gradients
        function(softmax_lse=lse, dq=dq, dk=dk, dv=dv, **common, **_PLAIN)
