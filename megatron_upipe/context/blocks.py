"""Attention of the groups of one ring step by a kernel, and adding up what the steps give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megatron_upipe.context.merge import accumulation_dtype, merge_
from megatron_upipe.context.pieces import Group, RingMask, Rows, Step, count
from megatron_upipe.kernels.protocol import Documents, Kernel

Place = slice | Tensor
"""Rows of a token axis: in one piece, or their numbers."""


class Blocks:
    """The calls of a kernel for one mask, with what they need on the device; remembered with the mask's segments."""

    def __init__(self, kernel: Kernel, mask: RingMask, scale: float) -> None:
        self._kernel, self._mask, self._scale = kernel, mask, scale

    def forward(self, step: Step, q: Tensor, kv: Tensor, total: AttentionSum) -> None:
        """Adds the attention of ``q`` [b, m, L, d] to the step's keys and values ``kv`` [b, 2c, l, d]."""
        for queries, keys, mask in self._calls(step, q):
            k, v = take(kv, keys).chunk(2, dim=1)
            out, lse = self._kernel.forward(take(q, queries), k, v, *mask)
            del k, v
            total.add(queries, out, lse)
            del out, lse

    def backward(
        self,
        step: Step,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        kv: Tensor,
        sums: tuple[GradientSum, GradientSum, GradientSum],
    ) -> None:
        """Adds to ``sums``: dq, dk and dv. ``tensors`` are dout, q, out, lse."""
        dq, dk, dv = sums
        for queries, keys, mask in self._calls(step, tensors[1]):
            k, v = take(kv, keys).chunk(2, dim=1)
            dout, q, out, lse = (take(t, queries) for t in tensors)
            block_dq, block_dk, block_dv = self._kernel.backward(dout, q, k, v, out, lse, *mask)
            del dout, q, out, lse, k, v
            for total, rows, gradient in ((dq, queries, block_dq), (dk, keys, block_dk), (dv, keys, block_dv)):
                total.add(rows, gradient)
            del block_dq, block_dk, block_dv, gradient

    def _calls(self, step: Step, like: Tensor) -> list[tuple[Place, Place, tuple]]:
        """One for each group, or for each of its pieces where it is one or the micro-batch is not."""
        batch, device = like.shape[0], like.device
        key = ("calls", id(step), batch > 1, device, self._scale)  # steps are remembered, too
        return self._mask.segments.remembered(
            key, lambda: [call for group in step.groups for call in self._group_calls(group, batch, device)]
        )

    def _group_calls(self, group: Group, batch: int, device: torch.device) -> Iterator[tuple]:
        mask, pieces = (group.causal, self._scale), group.pieces
        if batch > 1 or len(pieces) == 1:
            window = () if group.left is None else (group.left,)  # FP8 kernels know none
            for piece in pieces:
                yield slice(*piece.queries), slice(*piece.keys), mask + window
            return
        queries, keys = ([piece[i] for piece in pieces] for i in range(2))
        documents = Documents.of([b - a for a, b in queries], [b - a for a, b in keys], device)
        yield place(queries, device), place(keys, device), (*mask, group.left, documents)


class AttentionSum:
    """out and lse over the blocks so far; rows that no block had have out 0 and lse -inf."""

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, rows: Place, out: Tensor, lse: Tensor) -> None:
        """Takes over the tensors if they are the first and have all rows."""
        if self.out is None:
            if whole(rows, self._q.shape[2]):
                self.out, self.lse = out, lse
                return
            self._begin(out, lse)
            put(self.out, rows, out)
            put(self.lse, rows, lse)
            return
        self.out = self.out.to(accumulation_dtype(self._q.dtype))
        if isinstance(rows, slice):
            merge_(self.out[:, :, rows], self.lse[:, :, rows], out, lse)
            return
        total, total_lse = take(self.out, rows), take(self.lse, rows)
        merge_(total, total_lse, out, lse)
        put(self.out, rows, total)
        put(self.lse, rows, total_lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """out in the dtype of q, and lse; both owned by the caller."""
        if self.out is None:
            lse = self._q.new_empty(self._q.shape[:3], dtype=accumulation_dtype(self._q.dtype))
            self._begin(self._q, lse)
        return self.out.to(self._q.dtype), self.lse

    def _begin(self, out: Tensor, lse: Tensor) -> None:
        self.out = out.new_zeros(self._q.shape)
        self.lse = lse.new_full(self._q.shape[:3], -torch.inf)


class GradientSum:
    """Gradient of ``tensor`` [b, n, l, d], summed in ``dtype``; zero where nothing was added."""

    def __init__(self, tensor: Tensor, dtype: torch.dtype) -> None:
        self._tensor, self._dtype = tensor, dtype
        self._sum: Tensor | None = None

    def add(self, rows: Place, gradient: Tensor) -> None:
        """Takes over the gradient if it is the first and has all rows."""
        if self._sum is None:
            if whole(rows, self._tensor.shape[2]):
                self._sum = gradient.to(self._dtype)
                return
            self._sum = self._zeros()
        if isinstance(rows, slice):
            self._sum[:, :, rows] += gradient
        else:
            self._sum.index_add_(2, rows, gradient.to(self._dtype))

    def result(self) -> Tensor:
        """Owned by the caller."""
        return self._zeros() if self._sum is None else self._sum

    def room(self, rows: Sequence[Rows]) -> Tensor:
        """Memory for a gradient of ``rows``."""
        return room(self._tensor, rows, self._dtype)

    def _zeros(self) -> Tensor:
        return self._tensor.new_zeros(self._tensor.shape, dtype=self._dtype)


def place(rows: Sequence[Rows], device: torch.device) -> Place:
    """Rising, disjoint rows: a slice if nothing is between them."""
    if all(a.stop == b.start for a, b in pairwise(rows)):
        return slice(rows[0].start, rows[-1].stop)
    return numbers(rows, device)


def numbers(ranges: Sequence[Rows | range], device: torch.device) -> Tensor:
    """int64: everything in the ranges, one after the other."""
    starts = torch.tensor([r.start for r in ranges], dtype=torch.int64)
    lengths = torch.tensor([r.stop for r in ranges], dtype=torch.int64) - starts
    before = torch.cumsum(lengths, 0) - lengths
    total = count(ranges)  # known without the tensors, which may have no data
    return (torch.repeat_interleave(starts - before, lengths, output_size=total) + torch.arange(total)).to(device)


def take(tensor: Tensor, rows: Place) -> Tensor:
    """Rows of axis 2: a view of a slice, a copy of numbered ones."""
    return tensor[:, :, rows] if isinstance(rows, slice) else tensor.index_select(2, rows)


def room(tensor: Tensor, rows: Sequence[Rows], dtype: torch.dtype | None = None) -> Tensor:
    """Memory for ``rows`` of axis 2 of a tensor [b, n, l, d], in its or another dtype."""
    b, n, _, d = tensor.shape
    return tensor.new_empty(b, n, count(rows), d, dtype=dtype)


def put(tensor: Tensor, rows: Place, values: Tensor) -> None:
    """Overwrites rows of axis 2."""
    if isinstance(rows, slice):
        tensor[:, :, rows] = values
    else:
        tensor.index_copy_(2, rows, values.to(tensor.dtype))


def whole(rows: Place, length: int) -> bool:
    return isinstance(rows, slice) and (rows.start, rows.stop) == (0, length)
