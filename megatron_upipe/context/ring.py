"""Zigzag ring attention over the R ranks of the ring group.

Each ring rank holds a front and a back half of L/2 tokens in attention order. K and V (never expanded to the query
heads) travel one rank a step. For causal attention the block of step i, with K and V of ring rank ``source``, is

    source == rank    all queries x all keys, causal
    source <  rank    all queries x the front keys
    source >  rank    the back queries x all keys

so that every rank has the same work in every step. Source of the scheme: zigzag ring attention (zhuzilin's
ring-flash-attention); the backward sends each shard's dK and dV along with it and back to its owner.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_upipe.context.merge import MOST_IN_LOW_PRECISION, accumulation_dtype, merge_
from megatron_upipe.kernels.protocol import Kernel


class Transfer:
    """One batched send to the next and receive from the previous ring rank; ``wait`` exactly once."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup, tag: int) -> None:
        if not tensor.is_contiguous():
            raise ValueError("a tensor sent around the ring must be contiguous")
        rank, size = group.rank(), group.size()
        peers = dist.get_process_group_ranks(group)
        self._sent = tensor  # alive until it has left
        self._received = torch.empty_like(tensor)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, peers[(rank + 1) % size], group, tag),
                dist.P2POp(dist.irecv, self._received, peers[(rank - 1) % size], group, tag),
            ]
        )

    def wait(self) -> Tensor:
        """What the previous rank sent; owned by the caller."""
        if self._works is None:
            raise RuntimeError("wait called twice on the same ring transfer")
        for work in self._works:
            work.wait()
        self._works = self._sent = None
        return self._received


@dataclass(frozen=True)
class _Block:
    """Slices along the token axis, and whether the block is causal."""

    queries: slice
    keys: slice
    causal: bool


_ALL = slice(None)
_KV_TAG, _GRADIENT_TAG = 0, 1


def _block(step: int, group: dist.ProcessGroup, length: int, causal: bool) -> _Block:
    if not causal or step == 0:
        return _Block(_ALL, _ALL, causal)
    source = (group.rank() - step) % group.size()
    half = length // 2
    return _Block(_ALL, slice(half), False) if source < group.rank() else _Block(slice(half, None), _ALL, False)


def ring_forward(
    kernel: Kernel, q: Tensor, kv: Tensor, causal: bool, scale: float, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Attention of ``q`` [b, m, L, d] to the keys and values of all ring ranks. Collective over the ring.

    ``kv`` [b, 2c, L, d], keys before values, contiguous. Returns out (dtype of q) and lse (accumulation dtype, natural
    log) [b, m, L], owned by the caller.
    """
    if group is None:
        return kernel.forward(q, *kv.chunk(2, dim=1), causal, scale)
    out = lse = None
    for step in range(group.size()):
        transfer = Transfer(kv, group, _KV_TAG) if step + 1 < group.size() else None
        block = _block(step, group, q.shape[2], causal)
        k, v = kv[:, :, block.keys].chunk(2, dim=1)
        block_out, block_lse = kernel.forward(q[:, :, block.queries], k, v, block.causal, scale)
        if out is None:
            out, lse = block_out.to(accumulation_dtype(q.dtype)), block_lse
        else:
            merge_(out[:, :, block.queries], lse[:, :, block.queries], block_out, block_lse)
        del block_out, block_lse, k, v  # before the next block's
        if transfer is not None:
            kv = transfer.wait()
    return out.to(q.dtype), lse


def ring_backward(
    kernel: Kernel,
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``ring_forward``, given its out and lse. Collective over the ring.

    Returns dq [b, m, L, d], and dk and dv [b, c, L, d] of this rank's keys and values, owned by the caller. They are in
    accumulation dtype where R is above 8; else as the kernel returns them.
    """
    if group is None:
        return kernel.backward(dout, q, *kv.chunk(2, dim=1), out, lse, causal, scale)
    size = group.size()
    # one addition a rank; if they are few, in the precision of what is added
    dtype = q.dtype if size <= MOST_IN_LOW_PRECISION else accumulation_dtype(q.dtype)
    dq = gradients = None
    for step in range(size):
        transfer = Transfer(kv, group, _KV_TAG) if step + 1 < size else None
        block = _block(step, group, q.shape[2], causal)
        rows = block.queries
        k, v = kv[:, :, block.keys].chunk(2, dim=1)
        block_dq, block_dk, block_dv = kernel.backward(
            dout[:, :, rows], q[:, :, rows], k, v, out[:, :, rows], lse[:, :, rows], block.causal, scale
        )
        if dq is None:  # the first block has all rows
            dq, dkv = block_dq.to(dtype), torch.cat((block_dk, block_dv), dim=1).to(dtype)
        else:
            dq[:, :, rows] += block_dq
            dkv = gradients.wait()
            dk, dv = dkv[:, :, block.keys].chunk(2, dim=1)
            dk += block_dk
            dv += block_dv
            del dk, dv
        del k, v, block_dq, block_dk, block_dv  # before the next block's
        gradients = Transfer(dkv, group, _GRADIENT_TAG)
        del dkv
        if transfer is not None:
            kv = transfer.wait()
    return dq, *gradients.wait().chunk(2, dim=1)
