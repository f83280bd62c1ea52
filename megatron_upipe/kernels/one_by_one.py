"""Packed documents by a kernel that takes one document at a time, and a window by one that takes masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from megatron_upipe.kernels.protocol import Documents

WINDOW_TILE = 256
"""Queries that are computed together under a window."""


def forward_one_by_one(
    forward: Callable, q: Tensor, k: Tensor, v: Tensor, documents: Documents
) -> tuple[Tensor, Tensor]:
    """``forward(q, k, v)`` of each document."""
    outs, lses = zip(*(forward(q[:, :, a], k[:, :, b], v[:, :, b]) for a, b in _places(documents)), strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def backward_one_by_one(
    backward: Callable, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Documents
) -> tuple[Tensor, Tensor, Tensor]:
    """``backward(dout, q, k, v, out, lse)`` of each document."""
    found = [
        backward(dout[:, :, a], q[:, :, a], k[:, :, b], v[:, :, b], out[:, :, a], lse[:, :, a])
        for a, b in _places(documents)
    ]
    return tuple(torch.cat(parts, dim=2) for parts in zip(*found, strict=True))


def _places(documents: Documents) -> Iterator[tuple[slice, slice]]:
    ends = ([0, *accumulate(lengths)] for lengths in (documents.queries, documents.keys))
    for (a, b), (x, y) in zip(*map(pairwise, ends), strict=True):
        yield slice(a, b), slice(x, y)


def window_tiles(queries: int, keys: int, causal: bool, left: int) -> Iterator[tuple[slice, slice, int, int | None]]:
    """Tiles of queries with the keys that they see: (queries, keys, first, last).

    Of a tile, query i sees its keys from i + first up to i + last (None: all).
    """
    for start in range(0, queries, WINDOW_TILE):
        stop = min(start + WINDOW_TILE, queries)
        begin = max(0, start + keys - queries - left)
        end = stop if causal else keys
        shift = start - begin
        yield slice(start, stop), slice(begin, end), shift + keys - queries - left, shift if causal else None


def allowed(queries: int, keys: int, first: int, last: int | None, device: torch.device) -> Tensor:
    """bool [queries, keys]: whether a query of a tile sees a key."""
    offset = torch.arange(keys, device=device) - torch.arange(queries, device=device).unsqueeze(1)
    seen = offset >= first
    return seen if last is None else seen & (offset <= last)


def narrows(left: int | None, keys: int) -> bool:
    """Whether a window hides any of so many keys."""
    return left is not None and left < keys - 1
