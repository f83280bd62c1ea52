"""Tiles cover every row once, also among gathered shards."""

import math

from hypothesis import given
from hypothesis import strategies as st

from megatron_upipe.layers.tiles import Tiles


@given(st.integers(1, 60), st.integers(1, 200), st.integers(1, 4), st.integers(1, 4))
def test_tiles(tokens, tile_tokens, micro_batch, shards):
    tiles = Tiles.of(tokens, tile_tokens, micro_batch, shards)
    rows = tiles.rows()
    assert [i for r in rows for i in range(r.start, r.stop)] == list(range(tokens))
    sizes = [r.stop - r.start for r in rows]
    assert all(size == 1 or size * micro_batch * shards <= tile_tokens for size in sizes)
    assert set(sizes[:-1]) <= {tiles.size} and len({r.start for r in rows}) == len(rows)
    gathered = [i for pieces in tiles.gathered() for r in pieces for i in range(r.start, r.stop)]
    assert sorted(gathered) == list(range(tokens * shards))
    assert tiles == Tiles.of(tokens, tile_tokens, micro_batch, shards, unit=1)
    for r, pieces in zip(rows, tiles.gathered(), strict=True):
        assert [(p.start % tokens, p.start // tokens) for p in pieces] == [(r.start, i) for i in range(shards)]


@given(st.integers(1, 9), st.integers(1, 400), st.integers(1, 4), st.integers(1, 4), st.sampled_from([16, 32, 128]))
def test_tiles_of_multiples(units, tile_tokens, micro_batch, shards, unit):
    """FP8 products: where all tokens together are a multiple of a unit, so are those of every tile."""
    step = unit // math.gcd(unit, micro_batch * shards)
    tiles = Tiles.of(units * step, tile_tokens, micro_batch, shards, unit)
    sizes = [(r.stop - r.start) * micro_batch * shards for r in tiles.rows()]
    assert all(size % unit == 0 for size in sizes)
    assert all(size <= max(tile_tokens, step * micro_batch * shards) for size in sizes)
