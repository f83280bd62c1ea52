"""Tiles: pieces of the token axis that a layer works on one at a time. Pure index logic."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """``tokens`` rows of this rank in tiles of at most ``size``, the last one shorter.

    Under sequence parallelism over ``shards`` ranks a tile is the same rows of every rank's shard; gathered, they are
    ``shards`` pieces of the whole.
    """

    tokens: int
    size: int
    shards: int = 1

    @classmethod
    def of(cls, tokens: int, tile_tokens: int, micro_batch: int, shards: int = 1, unit: int = 1) -> Tiles:
        """Tiles that, gathered and over the whole micro-batch, have at most ``tile_tokens`` tokens.

        But at least one row, and a multiple of ``unit`` tokens if ``tokens`` are so."""
        together = micro_batch * shards
        step = unit // math.gcd(unit, together)
        return cls(tokens, min(tokens, max(step, tile_tokens // together // step * step)), shards)

    def rows(self) -> list[slice]:
        """Of this rank's tokens."""
        return [slice(i, min(i + self.size, self.tokens)) for i in range(0, self.tokens, self.size)]

    def gathered(self) -> list[tuple[slice, ...]]:
        """The same tiles among all shards' tokens, in the order of the ranks."""
        starts = [shard * self.tokens for shard in range(self.shards)]
        return [tuple(slice(s + rows.start, s + rows.stop) for s in starts) for rows in self.rows()]
