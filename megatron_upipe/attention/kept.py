"""Attention output and lse of one call between forward and backward, on the device or in the host store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_upipe.attention.heads import query_heads
from megatron_upipe.attention.schedule import HeadSchedule
from megatron_upipe.memory.host_store import HostStore, fetched_ahead

Rows = Sequence[slice]
"""Pieces of the token axis that are read together: one, or under sequence parallelism one of each rank's shard."""


class KeptAttention(Protocol):
    """Owned by the autograd node that made it; ``release`` may be called more than once."""

    def rows(self, tiles: Sequence[Rows]) -> Iterator[Tensor]:
        """For each tile the output's rows [t, b, H*d], heads in Megatron's order; not to be written to."""
        ...

    def stages(self) -> Iterator[tuple[Tensor, Tensor]]:
        """For each stage its output [s, b, U, d], heads rank-major, and lse [b, m, L]."""
        ...

    def release(self) -> None:
        """Lets go of everything."""
        ...


class DeviceAttention:
    """``out`` [s, b, H*d] and one lse [b, m, L] a stage, as ``attention_forward`` leaves them."""

    def __init__(self, out: Tensor, lse: tuple[Tensor, ...], schedule: HeadSchedule) -> None:
        self.out, self.lse, self.schedule = out, lse, schedule

    def rows(self, tiles: Sequence[Rows]) -> Iterator[Tensor]:
        for pieces in tiles:
            yield gather_rows(self.out, pieces)

    def stages(self) -> Iterator[tuple[Tensor, Tensor]]:
        heads = self.out.unflatten(2, (self.schedule.query_heads, -1))
        for stage, lse in zip(self.schedule.stages, self.lse, strict=True):
            yield query_heads(heads, self.schedule, stage, axis=2).flatten(2, 4), lse

    def release(self) -> None:
        self.out, self.lse = None, ()


class HostAttention:
    """A copy of a ``DeviceAttention`` in the host store, one buffer a stage, so that either way of reading is of
    contiguous memory. The device's tensors are the caller's to drop."""

    def __init__(self, kept: DeviceAttention, store: HostStore) -> None:
        self._schedule, self._like = kept.schedule, kept.out.new_empty(0)
        self._width = kept.out.shape[1:]
        pairs = [(store.park(out), store.park(lse)) for out, lse in kept.stages()]
        self._out, self._lse = [out for out, _ in pairs], [lse for _, lse in pairs]

    def rows(self, tiles: Sequence[Rows]) -> Iterator[Tensor]:
        def start(pieces: Rows) -> Callable[[], Tensor]:
            fetches = [[part.start(rows) for rows in pieces] for part in self._out]

            def finish() -> Tensor:
                tokens = sum(rows.stop - rows.start for rows in pieces)
                tile = self._like.new_empty(tokens, *self._width)
                heads = tile.unflatten(2, (self._schedule.query_heads, -1))
                for stage, parts in zip(self._schedule.stages, fetches, strict=True):
                    view = query_heads(heads, self._schedule, stage, axis=2)
                    part = parts[0].wait() if len(parts) == 1 else torch.cat([p.wait() for p in parts])
                    view.copy_(part.view(view.shape))
                return tile

            return finish

        return fetched_ahead([lambda pieces=pieces: start(pieces) for pieces in tiles])

    def stages(self) -> Iterator[tuple[Tensor, Tensor]]:
        def start(i: int) -> Callable[[], tuple[Tensor, Tensor]]:
            out, lse = self._out[i].start(), self._lse[i].start()
            return lambda: (out.wait(), lse.wait())

        return fetched_ahead([lambda i=i: start(i) for i in range(len(self._out))])

    def release(self) -> None:
        for parked in (*self._out, *self._lse):
            parked.release()


def gather_rows(tensor: Tensor, pieces: Rows) -> Tensor:
    """Rows of ``tensor`` [s, ...]: a view for one piece, a copy for several."""
    return tensor[pieces[0]] if len(pieces) == 1 else torch.cat([tensor[rows] for rows in pieces])
