"""Segments: the documents of a packed sequence and where the zigzag begins anew. Pure Python.

A *span* is what one zigzag is laid over: the whole sequence, or under the per-document layout each padded document. A
document is attended within itself only. Positions are those in the packed sequence, rows those of a ring rank's tokens
in attention order (rising positions).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from megatron_upipe.context.layout import SequenceLayout
from megatron_upipe.errors import UPipeError


class Run(NamedTuple):
    """Tokens that follow each other in the sequence and in a ring rank's rows."""

    row: int
    position: int
    length: int

    @property
    def stop(self) -> int:
        """Position after the last one."""
        return self.position + self.length


class Segments:
    """Documents of one sequence of ``spans[-1]`` tokens, the same on every rank of the context-parallel group.

    ``spans``: rising positions from 0, each span a multiple of 2*P*R tokens. ``documents``: (start, stop) of each one's
    real tokens, rising and disjoint; ``starts``: where each document's padded place begins. Tokens of no document are
    padding. Compared by identity; what is derived from it is remembered with it.
    """

    def __init__(
        self, layout: SequenceLayout, spans: Sequence[int], documents: Sequence[tuple[int, int]], starts: Sequence[int]
    ) -> None:
        self.layout = layout
        self.spans, self.documents, self.starts = tuple(spans), tuple(documents), tuple(starts)
        self._remembered: dict[Hashable, Any] = {}

    @property
    def length(self) -> int:
        """S: tokens of the whole sequence."""
        return self.spans[-1]

    @property
    def ring_length(self) -> int:
        """L: tokens of a ring rank."""
        return self.length // self.layout.ring_size

    def remembered(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` has made for ``key`` before."""
        if key not in self._remembered:
            self._remembered[key] = make()
        return self._remembered[key]

    def shard(self, rank: int) -> list[range]:
        """Positions of the tokens of context-parallel rank ``rank`` in local order: front and back of every span."""
        return [
            range(start + half.start, start + half.stop)
            for start, stop in pairwise(self.spans)
            for half in self.layout.positions(rank, stop - start)
        ]

    def runs(self, ring_rank: int) -> list[Run]:
        """The tokens of a ring rank in attention order; neighbours that follow each other are one run."""
        halves = SequenceLayout(1, self.layout.ring_size)
        found: list[Run] = []
        row = 0
        for start, stop in pairwise(self.spans):
            for half in halves.positions(ring_rank, stop - start):
                run = Run(row, start + half.start, len(half))
                row += run.length
                if found and found[-1].stop == run.position:
                    found[-1] = found[-1]._replace(length=found[-1].length + run.length)
                else:
                    found.append(run)
        return found

    def document_runs(self, ring_rank: int) -> dict[int, list[Run]]:
        """Number of a document -> its part of a ring rank's tokens; consecutive rows. Only where there is any."""
        return self.remembered(("document runs", ring_rank), lambda: self._document_runs(ring_rank))

    def _document_runs(self, ring_rank: int) -> dict[int, list[Run]]:
        found: dict[int, list[Run]] = {}
        number = 0
        for run in self.runs(ring_rank):
            while number < len(self.documents) and self.documents[number][1] <= run.position:
                number += 1
            each = number
            while each < len(self.documents) and self.documents[each][0] < run.stop:
                start = max(run.position, self.documents[each][0])
                stop = min(run.stop, self.documents[each][1])
                found.setdefault(each, []).append(Run(run.row + start - run.position, start, stop - start))
                each += 1
        return found


@lru_cache(maxsize=16)
def one_document(layout: SequenceLayout, length: int) -> Segments:
    """A sequence that is not packed."""
    return Segments(layout, (0, length), ((0, length),), (0,))


def packed_segments(
    layout: SequenceLayout, length: int, padded: Sequence[int], real: Sequence[int], per_document: bool
) -> Segments:
    """From cumulative lengths of the documents, with padding and of the real tokens alone.

    Both begin with 0; real tokens are the first of a document's place. Behind ``padded[-1]`` there may be further
    tokens up to ``length``, padding all of them. ``per_document``: every document, and that tail, is a zigzag of its
    own, else the sequence is one. Raises UPipeError for lengths that do not fit.
    """
    _check_cumulative("cu_seqlens_q_padded", padded)
    _check_cumulative("cu_seqlens_q", real)
    if len(padded) != len(real):
        raise UPipeError(
            f"cu_seqlens_q has {len(real) - 1} documents and cu_seqlens_q_padded {len(padded) - 1}; both count the same"
        )
    if padded[-1] > length:
        raise UPipeError(
            f"the packed documents (cu_seqlens_q) have {padded[-1]} tokens, but the hidden states of all "
            f"context-parallel ranks {length}"
        )
    places = [(a, b, y - x) for (a, b), (x, y) in zip(pairwise(padded), pairwise(real), strict=True) if b > a]
    for a, b, tokens in places:
        if tokens > b - a:
            raise UPipeError(f"a document of {tokens} tokens (cu_seqlens_q) has {b - a} in cu_seqlens_q_padded")
    documents = [(a, a + tokens) for a, _, tokens in places if tokens]
    starts = [a for a, _, _ in places] + ([padded[-1]] if padded[-1] < length else [])
    spans = [*starts, length] if per_document else [0, length]
    for a, b in pairwise(spans):
        if not layout.divides(b - a):
            unit = 2 * layout.size
            raise UPipeError(
                f"a packed document of {b - a} tokens is no multiple of {unit} (2 x context-parallel size), which "
                f"--sft and TransformerEngine's layout need; pad it to {-(-(b - a) // unit) * unit}"
                if per_document
                else f"{length} packed tokens are no multiple of {unit} (2 x context-parallel size); pad to "
                f"{-(-length // unit) * unit}"
            )
    return Segments(layout, spans, documents, starts or [0])


def _check_cumulative(name: str, lengths: Sequence[int]) -> None:
    if not lengths or lengths[0] != 0 or any(b < a for a, b in pairwise(lengths)):
        shown = ", ".join(map(str, lengths[:4]))
        raise UPipeError(f"{name} [{shown}, ...] are no cumulative lengths; they begin with 0 and rise")
