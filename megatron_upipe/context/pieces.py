"""Which queries of a ring rank see which keys of another: rectangles of rows, cut by documents, time and window.

Pure Python. For a causal sequence of one document the keys of ring rank ``source`` are seen

    source == rank    all queries x all keys, causal
    source <  rank    all queries x the front keys
    source >  rank    the back queries x all keys

so that every rank has the same work in every step. Source of the scheme: zigzag ring attention (zhuzilin's
ring-flash-attention). Documents cut these rectangles; a window of w tokens (a query at position p sees keys from p - w
on) trims them and may leave a *band*.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from megatron_upipe.context.segments import Run, Segments


class Rows(NamedTuple):
    """From start up to stop."""

    start: int
    stop: int


def count(rows: Sequence[Rows]) -> int:
    """How many rows that is."""
    return sum(one.stop - one.start for one in rows)


class Piece(NamedTuple):
    """``queries`` x ``keys``, rows of the two ring ranks.

    ``causal``: a square of which each query sees the keys up to itself. ``left``: of the keys up to the diagonal that
    ends in the lower right corner a query sees ``left`` further ones; None: all.
    """

    queries: Rows
    keys: Rows
    causal: bool
    left: int | None


@dataclass(frozen=True)
class Group:
    """Pieces with the same mask that share neither queries nor keys; rising, so that one call can do them."""

    pieces: tuple[Piece, ...]

    @property
    def causal(self) -> bool:
        return self.pieces[0].causal

    @property
    def left(self) -> int | None:
        return self.pieces[0].left


@dataclass(frozen=True)
class Step:
    """What a ring rank does with keys of another: ``seen`` are the rows that it sees any of, rising; groups count keys
    among those. It is sent these, or all, where they are half or more: that takes no copy."""

    seen: tuple[Rows, ...]
    groups: tuple[Group, ...]
    sent_whole: bool


@dataclass(frozen=True)
class RingMask:
    """Who sees what in a packed sequence; ``window`` (causal only) in tokens before the query's own, None: all."""

    segments: Segments
    causal: bool
    window: int | None = None

    def step(self, rank: int, source: int) -> Step | None:
        """Of ring rank ``rank`` with keys of ring rank ``source``; None where it sees none of them."""
        key = ("step", self.causal, self.window, rank, source)
        return self.segments.remembered(key, lambda: self._step(rank, source))

    @property
    def additions(self) -> int:
        """How many parts a row's gradient has at most in a step of the ring: with a window a band is cut in three."""
        return 1 if self.window is None else 3

    def _step(self, rank: int, source: int) -> Step | None:
        found = list(self.pieces(rank, source))
        if not found:
            return None
        length = self.segments.ring_length
        seen = (Rows(0, length),) if rank == source else _union([piece.keys for piece in found])
        before = list(accumulate((rows.stop - rows.start for rows in seen), initial=0))
        starts = [rows.start for rows in seen]

        def among_seen(keys: Rows) -> Rows:
            i = bisect_right(starts, keys.start) - 1
            return Rows(keys.start - starts[i] + before[i], keys.stop - starts[i] + before[i])

        moved = [piece._replace(keys=among_seen(piece.keys)) for piece in sorted(found, key=lambda p: p.queries)]
        return Step(seen, tuple(_grouped(moved)), sent_whole=2 * before[-1] >= length)

    def pieces(self, rank: int, source: int) -> Iterator[Piece]:
        """Document by document."""
        keys_of = self.segments.document_runs(source)
        for number, queries in self.segments.document_runs(rank).items():
            keys = keys_of.get(number)
            if keys is not None:
                yield from self._pieces(queries, keys, rank == source)

    def _pieces(self, queries: list[Run], keys: list[Run], own: bool) -> Iterator[Piece]:
        if not self.causal or (own and self._reaches(queries[-1], keys[0])):
            # a window may be too wide to matter here, but one mask for all documents is one group
            yield Piece(_rows(queries), _rows(keys), self.causal, self.window)
        elif self._reaches(queries[-1], keys[0]):
            yield from _earlier(queries, keys)
        else:
            for query in queries:
                for key in keys:
                    if key.position == query.position:
                        yield Piece(_rows([query]), _rows([key]), True, self.window)
                    elif key.stop <= query.position:
                        yield from self._band(query, key)

    def _reaches(self, query: Run, key: Run) -> bool:
        """Whether the last query sees the first key, time apart."""
        return self.window is None or query.stop - 1 - self.window <= key.position

    def _band(self, query: Run, key: Run) -> Iterator[Piece]:
        """Earlier keys, as far as the window goes.

        Queries that see all of them; of those behind, the square in which each sees from its diagonal on, and the keys
        behind that square. So all bands have one mask, and queries as keys: of more queries flash-attn would cut off
        keys on the right.
        """
        every = min(max(query.position, key.position + self.window + 1), query.stop)
        last = min(query.stop, key.stop + self.window)
        if query.position < every:
            yield Piece(_part(query, query.position, every), _part(key, key.position, key.stop), False, None)
        if every < last:
            queries, behind = _part(query, every, last), last - self.window
            yield Piece(queries, _part(key, every - self.window, behind), False, 0)
            if behind < key.stop:
                yield Piece(queries, _part(key, behind, key.stop), False, None)


def _part(run: Run, start: int, stop: int) -> Rows:
    """Rows of some positions of a run."""
    return Rows(run.row + start - run.position, run.row + stop - run.position)


def _rows(runs: Sequence[Run]) -> Rows:
    return Rows(runs[0].row, runs[-1].row + runs[-1].length)


def _earlier(queries: list[Run], keys: list[Run]) -> Iterator[Piece]:
    """Each query run with the keys before it; runs that see the same keys together."""
    together: list[Run] = []
    seen: list[Run] = []
    for query in [*queries, None]:
        before = [] if query is None else [key for key in keys if key.stop <= query.position]
        if together and before != seen:
            yield Piece(_rows(together), _rows(seen), False, None)
            together = []
        seen = before
        if before:
            together.append(query)


def _union(rows: list[Rows]) -> tuple[Rows, ...]:
    """Rising, disjoint, neighbours together."""
    found: list[Rows] = []
    for one in sorted(rows):
        if found and one.start <= found[-1].stop:
            found[-1] = Rows(found[-1].start, max(found[-1].stop, one.stop))
        else:
            found.append(one)
    return tuple(found)


def _grouped(pieces: list[Piece]) -> Iterator[Group]:
    groups: dict[tuple, list[list[Piece]]] = {}
    for piece in pieces:
        same = groups.setdefault((piece.causal, piece.left), [])
        for group in same:
            last = group[-1]
            if last.queries.stop <= piece.queries.start and last.keys.stop <= piece.keys.start:
                group.append(piece)
                break
        else:
            same.append([piece])
    for same in groups.values():
        yield from (Group(tuple(group)) for group in same)
