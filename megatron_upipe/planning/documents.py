"""Packed documents of a run to be simulated: their lengths, and how much attention they are. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, cycle

from megatron_upipe.context.layout import SequenceLayout
from megatron_upipe.context.pieces import RingMask
from megatron_upipe.context.segments import Segments, one_document, packed_segments


def fill(pattern: Sequence[int], tokens: int) -> list[int]:
    """Documents of the pattern's lengths, again and again, in a sequence of ``tokens``; the last is cut."""
    lengths, left = [], tokens
    for length in cycle(pattern):
        if left <= length:
            return [*lengths, left]
        lengths.append(length)
        left -= length
    raise ValueError("an empty pattern fills nothing")


def shrink(lengths: Sequence[int], tokens: int, unit: int) -> list[int]:
    """As many documents of the same shares, multiples of ``unit``, in a shorter sequence of ``tokens``.

    Fewer where there is not a unit for each.
    """
    whole = sum(lengths)
    ends = [round(end * (tokens // unit) / whole) * unit for end in accumulate(lengths)]
    return [b - a for a, b in zip([0, *ends], ends, strict=False) if b > a]


def segments_of(lengths: Sequence[int] | None, layout: SequenceLayout, tokens: int, per_document: bool) -> Segments:
    """Raises UPipeError for lengths that do not fit the layout; None: one document that is not packed."""
    if lengths is None:
        return one_document(layout, tokens)
    cumulative = [0, *accumulate(lengths)]
    return packed_segments(layout, tokens, cumulative, cumulative, per_document)


def seen_pairs(queries: int, keys: int, causal: bool, left: int | None) -> float:
    """Of queries with keys that they see; on the diagonal half a pair."""
    every = queries * keys / (2 if causal else 1)
    if left is None or left >= keys:
        return every
    return every - (keys - left) ** 2 / 2  # the corner that lies too far back


def pairs_of_rank(segments: Segments, rank: int) -> float:
    """Of causal attention of a ring rank."""
    mask = RingMask(segments, causal=True)
    return sum(
        seen_pairs(piece.queries.stop - piece.queries.start, piece.keys.stop - piece.keys.start, piece.causal, None)
        for source in range(segments.layout.ring_size)
        for piece in mask.pieces(rank, source)
    )


def most_pairs(segments: Segments) -> float:
    """Of the ring rank that has the most; for it the others wait."""
    return max(pairs_of_rank(segments, rank) for rank in range(segments.layout.ring_size))
