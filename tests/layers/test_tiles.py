"""Tiles cover every row once, also among gathered shards."""

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
    for r, pieces in zip(rows, tiles.gathered(), strict=True):
        assert [(p.start % tokens, p.start // tokens) for p in pieces] == [(r.start, i) for i in range(shards)]
