"""Sequence layout: which rank holds which token, and in which order a ring rank attends. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SequenceLayout:
    """Megatron's zigzag over the P*R context-parallel ranks, P innermost.

    The sequence is cut into 2*P*R chunks; rank c = ring_rank * P + ulysses_rank holds chunks c and 2*P*R - 1 - c, its
    *front* and *back* half. The P ranks of one ring rank together hold a zigzag over R: P consecutive front chunks and
    P consecutive back chunks, the latter in falling order of the rank. *Attention order* is the rising order of
    positions within a ring rank: fronts of ranks 0..P-1, then backs of ranks P-1..0.
    """

    ulysses_size: int
    ring_size: int

    @property
    def size(self) -> int:
        """Number of context-parallel ranks, P*R."""
        return self.ulysses_size * self.ring_size

    def divides(self, length: int) -> bool:
        """Whether a sequence of ``length`` tokens can be cut into 2*P*R equal chunks."""
        return length > 0 and length % (2 * self.size) == 0

    def chunks(self, rank: int) -> tuple[int, int]:
        """Front and back chunk of context-parallel rank ``rank``."""
        return rank, 2 * self.size - 1 - rank

    def chunks_in_attention_order(self, ring_rank: int) -> list[int]:
        """The 2*P chunks of ``ring_rank`` as its attention sees them; rising."""
        ranks = range(ring_rank * self.ulysses_size, (ring_rank + 1) * self.ulysses_size)
        return [self.chunks(r)[0] for r in ranks] + [self.chunks(r)[1] for r in reversed(ranks)]

    def positions(self, rank: int, length: int) -> list[range]:
        """Global positions of the tokens of context-parallel rank ``rank``: its front and its back, in local order."""
        chunk = length // (2 * self.size)
        return [range(c * chunk, (c + 1) * chunk) for c in self.chunks(rank)]
