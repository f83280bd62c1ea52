"""The sequence layout: every token once, causal order, Megatron's own zigzag."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_upipe.context.layout import SequenceLayout

sizes = st.integers(1, 9)


@given(sizes, sizes, st.integers(1, 5))
def test_every_position_is_held_once(p, r, chunk):
    layout = SequenceLayout(p, r)
    length = 2 * layout.size * chunk
    assert layout.divides(length)
    held = [position for rank in range(layout.size) for half in layout.positions(rank, length) for position in half]
    assert sorted(held) == list(range(length))


@given(sizes, sizes)
def test_attention_order_rises_and_is_a_zigzag_over_the_ring(p, r):
    layout = SequenceLayout(p, r)
    for ring_rank in range(r):
        chunks = layout.chunks_in_attention_order(ring_rank)
        assert chunks == sorted(chunks)
        assert [c // p for c in chunks] == [ring_rank] * p + [2 * r - 1 - ring_rank] * p
        of_ranks = [c for u in range(p) for c in layout.chunks(ring_rank * p + u)]
        assert sorted(of_ranks) == chunks


@given(sizes, sizes, st.integers(1, 200))
def test_divides(p, r, length):
    layout = SequenceLayout(p, r)
    assert layout.divides(length) == (length % (2 * p * r) == 0)
    assert not layout.divides(0)


@given(sizes, sizes)
def test_ring_steps_are_causal(p, r):
    """What the ring relies on: an earlier ring rank's front lies before all of mine, its back after all of mine."""
    layout = SequenceLayout(p, r)
    for mine in range(r):
        own = layout.chunks_in_attention_order(mine)
        for other in range(r):
            front, back = (layout.chunks_in_attention_order(other)[i * p : (i + 1) * p] for i in (0, 1))
            if other < mine:
                assert max(front) < min(own) and min(back) > max(own)
            elif other > mine:
                assert max(front + back) < min(own[p:]) and min(front) > max(own[:p])
