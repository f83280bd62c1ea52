"""Torch's CPU flash attention: linear memory, GQA, fp64 to bf16.

The operation is ``aten::_scaled_dot_product_flash_attention_for_cpu``. Windows are masks of tiles of queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_upipe.kernels.one_by_one import (
    allowed,
    backward_one_by_one,
    forward_one_by_one,
    narrows,
    window_tiles,
)
from megatron_upipe.kernels.protocol import Documents

_OPS = torch.ops.aten
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TorchCpuKernel:
    """See ``protocol.Kernel``."""

    name: str = "torch-cpu"
    windows: bool = True

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type != "cpu":
            return "needs CPU tensors"
        return None if dtype in _DTYPES else f"{dtype} is not supported"

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
        if documents is not None:
            return forward_one_by_one(partial(self.forward, causal=causal, scale=scale, left=left), q, k, v, documents)
        if not narrows(left, k.shape[2]):
            return _OPS._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for rows, keys, *limits in window_tiles(q.shape[2], k.shape[2], causal, left):
            tile = q[:, :, rows], k[:, :, keys], v[:, :, keys]
            out[:, :, rows], lse[:, :, rows] = _OPS._scaled_dot_product_flash_attention_for_cpu(
                *tile, 0.0, False, attn_mask=_mask(*tile[:2], *limits), scale=scale
            )
        return out, lse

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
        if documents is not None:
            one = partial(self.backward, causal=causal, scale=scale, left=left)
            return backward_one_by_one(one, dout, q, k, v, out, lse, documents)
        operation = _OPS._scaled_dot_product_flash_attention_for_cpu_backward
        if not narrows(left, k.shape[2]):
            return operation(dout, q, k, v, out, lse, 0.0, causal, scale=scale)
        dtype = torch.promote_types(q.dtype, torch.float32)
        dq, dk, dv = q.new_empty(q.shape), k.new_zeros(k.shape, dtype=dtype), v.new_zeros(v.shape, dtype=dtype)
        for rows, keys, *limits in window_tiles(q.shape[2], k.shape[2], causal, left):
            tile = q[:, :, rows], k[:, :, keys], v[:, :, keys]
            of_rows = out[:, :, rows], lse[:, :, rows].contiguous()
            mask = _mask(*tile[:2], *limits)
            dq[:, :, rows], tile_dk, tile_dv = operation(
                dout[:, :, rows], *tile, *of_rows, 0.0, False, attn_mask=mask, scale=scale
            )
            dk[:, :, keys] += tile_dk
            dv[:, :, keys] += tile_dv
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def workspace_bytes(self, batch: int, heads: int, tokens: int, head_dim: int) -> int:
        return 0


def _mask(q: Tensor, k: Tensor, first: int, last: int | None) -> Tensor:
    """0 where a query sees a key, -inf elsewhere."""
    seen = allowed(q.shape[2], k.shape[2], first, last, q.device)
    return q.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
