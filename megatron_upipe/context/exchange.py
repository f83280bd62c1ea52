"""The exchange: all-to-all between sequence shards and head shards within the Ulysses group.

    sequence shard                    head shard
    [s, b, P*n, d]   -- to_heads ->   [b, n, L, d]     n heads of each rank, heads rank-major
                     <- to_sequence --                 L = P*s tokens in attention order (front half, back half)

Where the zigzag begins anew with every document, ``order`` [L] says which of the tokens, rank by rank, comes where.
Both are collective over the Ulysses group, in both directions s*b*P*n*d elements; P = 1 only reorders.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def to_heads(shard: Tensor, group: dist.ProcessGroup | None, order: Tensor | None = None) -> Tensor:
    """``[s, b, P*n, d]`` (any strides) -> ``[b, n, L, d]``, contiguous, owned by the caller. Collective."""
    p = 1 if group is None else group.size()
    s, b, heads, d = shard.shape
    n = heads // p
    received = _all_to_all(shard.view(s, b, p, n, d).permute(2, 0, 1, 3, 4), group)  # [P, s, b, n, d]
    if order is not None:
        return received.flatten(0, 1).permute(1, 2, 0, 3).index_select(2, order)
    half = s // 2
    out = shard.new_empty(b, n, 2, p, half, d)
    out[:, :, 0] = received[:, :half].permute(2, 3, 0, 1, 4)  # fronts: rising with the rank
    out[:, :, 1] = received[:, half:].flip(0).permute(2, 3, 0, 1, 4)  # backs: falling
    return out.view(b, n, p * s, d)


def to_sequence(heads: Tensor, group: dist.ProcessGroup | None, order: Tensor | None = None) -> Tensor:
    """``[b, n, L, d]`` -> ``[s, b, P*n, d]``, owned by the caller; inverse of ``to_heads``. Collective."""
    p = 1 if group is None else group.size()
    b, n, length, d = heads.shape
    s = length // p
    send = heads.new_empty(p, s, b, n, d)
    if order is not None:
        send.flatten(0, 1).index_copy_(0, order, heads.permute(2, 0, 1, 3))
    else:
        half = s // 2
        halves = heads.reshape(b, n, 2, p, half, d)
        send[:, :half] = halves[:, :, 0].permute(2, 3, 0, 1, 4)
        send[:, half:] = halves[:, :, 1].permute(2, 3, 0, 1, 4).flip(0)
    received = _all_to_all(send, group)  # [P, s, b, n, d]: the heads of each rank
    return received.permute(1, 2, 0, 3, 4).reshape(s, b, p * n, d)


def _all_to_all(send: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sends row r of ``[P, ...]`` to rank r; row r of the result comes from rank r."""
    send = send.contiguous()
    if group is None:
        return send
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    return received
