"""Segments and the pieces of ring steps: every token once, and exactly the keys that the definition says are seen."""

from itertools import accumulate, chain, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_upipe.context.blocks import numbers
from megatron_upipe.context.layout import SequenceLayout
from megatron_upipe.context.packing import exchange_order, positions_in_documents
from megatron_upipe.context.pieces import RingMask
from megatron_upipe.context.segments import one_document, packed_segments
from megatron_upipe.errors import UPipeError

CPU = torch.device("cpu")


@st.composite
def packings(draw):
    """Segments of random documents in either layout, with padding and a tail."""
    layout = SequenceLayout(draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    unit, per_document = 2 * layout.size, draw(st.booleans())
    real = draw(st.lists(st.integers(0, 40), min_size=1, max_size=6))
    padding = draw(st.lists(st.integers(0, 3), min_size=len(real), max_size=len(real)))
    padded = [-(-n // unit) * unit if per_document else n + extra for n, extra in zip(real, padding, strict=True)]
    cumulative = [[0, *accumulate(n)] for n in (padded, real)]
    length = (-(-max(cumulative[0][-1], 1) // unit) + draw(st.integers(0, 1))) * unit
    return packed_segments(layout, length, *cumulative, per_document)


def positions(segments, ring_rank):
    return [i for run in segments.runs(ring_rank) for i in range(run.position, run.stop)]


@given(packings())
def test_every_token_is_held_once_in_rising_order(segments):
    layout = segments.layout
    shards = [[i for half in segments.shard(rank) for i in half] for rank in range(layout.size)]
    assert sorted(chain(*shards)) == list(range(segments.length))
    assert {len(shard) for shard in shards} == {segments.length // layout.size}
    for ring_rank in range(layout.ring_size):
        held = positions(segments, ring_rank)
        assert held == sorted(held) and len(held) == segments.ring_length
        together = shards[ring_rank * layout.ulysses_size : (ring_rank + 1) * layout.ulysses_size]
        assert sorted(chain(*together)) == held
        order = exchange_order(segments, ring_rank, CPU)
        if order is not None:
            assert torch.tensor(list(chain(*together)))[order].tolist() == held


@given(packings())
def test_positions_begin_anew_with_every_document(segments):
    for rank in range(segments.layout.size):
        found = positions_in_documents(segments, rank, CPU).tolist()
        held = [i for half in segments.shard(rank) for i in half]
        for start, stop in segments.documents:
            assert all(p == i - start for i, p in zip(held, found, strict=True) if start <= i < stop)
        assert min(found) >= 0


def covered(step, length):
    """How often each pair is computed, [rows, rows]; checks on the way what kernels and ring rely on."""
    pairs = torch.zeros(length, length, dtype=torch.int)
    if step is None:
        return pairs
    rows = [row for one in step.seen for row in range(*one)]
    assert rows == sorted(set(rows)) and step.sent_whole == (2 * len(rows) >= length)
    for group in step.groups:
        for before, piece in pairwise(group.pieces):
            assert (before.causal, before.left) == (piece.causal, piece.left)
            assert before.queries.stop <= piece.queries.start and before.keys.stop <= piece.keys.start
        for queries, keys, causal, left in group.pieces:
            l, keys_l = queries.stop - queries.start, keys.stop - keys.start
            assert l > 0 and keys_l > 0 and (left is None or left >= 0)
            assert l == keys_l if causal or left is not None else True, "flash-attn would cut off keys"
            offset = torch.arange(keys_l) - torch.arange(l).unsqueeze(1)
            seen = offset <= 0 if causal else torch.ones_like(offset, dtype=torch.bool)
            if left is not None:
                seen &= offset >= keys_l - l - left
            pairs[queries.start : queries.stop, rows[keys.start] : rows[keys.stop - 1] + 1] += seen.int()
            assert rows[keys.stop - 1] - rows[keys.start] == keys_l - 1
    return pairs


@settings(max_examples=300)
@given(packings(), st.booleans(), st.sampled_from([None, 0, 1, 2, 5, 12, 30]))
def test_pieces_are_what_the_definition_says(segments, causal, window):
    mask = RingMask(segments, causal, window if causal else None)
    number = torch.full((segments.length,), -1)
    for i, (start, stop) in enumerate(segments.documents):
        number[start:stop] = i
    held = [torch.tensor(positions(segments, rank)) for rank in range(segments.layout.ring_size)]
    for rank, queries in enumerate(held):
        for source, keys in enumerate(held):
            seen = (number[queries].unsqueeze(1) == number[keys]) & (number[keys] >= 0)
            if causal:
                distance = queries.unsqueeze(1) - keys
                seen &= (distance >= 0) & (distance <= (segments.length if window is None else window))
            assert torch.equal(covered(mask.step(rank, source), segments.ring_length), seen.int())


def test_one_document_is_the_zigzag_ring():
    """Two groups of calls at most, whole tensors sent: what the ring did before there were documents."""
    mask = RingMask(one_document(SequenceLayout(2, 4), 64), causal=True)
    for rank in range(4):
        for source in range(4):
            (group,) = mask.step(rank, source).groups
            (piece,) = group.pieces
            assert mask.step(rank, source).sent_whole
            wanted = {-1: ((0, 16), (0, 8)), 0: ((0, 16), (0, 16)), 1: ((8, 16), (0, 16))}
            assert (tuple(piece.queries), tuple(piece.keys)) == wanted[(source > rank) - (source < rank)]


def test_steps_outside_a_window_and_of_other_documents_are_none():
    layout = SequenceLayout(1, 4)
    window = RingMask(one_document(layout, 64), causal=True, window=7)
    for rank in range(4):
        near = {source for source in range(4) if window.step(rank, source)}
        assert near == {rank, max(rank - 1, 0), min(rank + 1, 3)}
    # 8 documents that begin and end with the chunks of 8 tokens: nobody needs anybody
    documents = packed_segments(layout, 64, range(0, 65, 8), range(0, 65, 8), per_document=False)
    mask = RingMask(documents, causal=True)
    assert all((mask.step(rank, source) is None) == (rank != source) for rank in range(4) for source in range(4))


@pytest.mark.parametrize("per_document", [True, False])
def test_a_window_over_many_documents_is_few_calls(per_document):
    """One mask for all bands; and of the ring's rows only those that are seen."""
    layout = SequenceLayout(1, 4)
    lengths = [8 * n for n in range(20, 60)]
    cumulative = [0, *accumulate(lengths)]
    segments = packed_segments(layout, cumulative[-1], cumulative, cumulative, per_document)
    mask = RingMask(segments, causal=True, window=9)
    for rank in range(4):
        for source in range(4):
            step = mask.step(rank, source)
            if step is None:
                continue
            parts = [
                sum(
                    a < piece.queries.stop and piece.queries.start <= a
                    for group in step.groups
                    for piece in group.pieces
                )
                for a in range(segments.ring_length)
            ]
            assert len(step.groups) <= 6 and max(parts) <= mask.additions
            if rank != source:
                assert sum(rows.stop - rows.start for rows in step.seen) <= 2 * 9 * len(lengths)


def test_numbers():
    assert numbers([range(3, 5), range(0), range(9, 10)], CPU).tolist() == [3, 4, 9]


LAYOUT = SequenceLayout(2, 1)
GOOD = dict(padded=[0, 8, 12], real=[0, 5, 7])


@pytest.mark.parametrize(
    ("changes", "per_document", "message"),
    [
        (dict(real=[0, 5]), True, "cu_seqlens_q has 1 documents and cu_seqlens_q_padded 2"),
        (dict(real=[1, 5, 7]), True, r"cu_seqlens_q \[1, 5, 7, ...\] are no cumulative lengths"),
        (dict(padded=[0, 8, 4]), True, "cu_seqlens_q_padded .* are no cumulative lengths; they begin with 0 and rise"),
        (dict(padded=[]), True, "cu_seqlens_q_padded .* are no cumulative"),
        (dict(padded=[0, 8, 20]), True, r"have 20 tokens, but the hidden states of all context-parallel ranks 16"),
        (dict(real=[0, 5, 10]), True, "a document of 5 tokens .* has 4 in cu_seqlens_q_padded"),
        (dict(padded=[0, 7, 12]), True, r"a packed document of 7 tokens is no multiple of 4 .*; pad it to 8"),
        (dict(length=18), False, "18 packed tokens are no multiple of 4 .*; pad to 20"),
    ],
)
def test_lengths_that_do_not_fit(changes, per_document, message):
    with pytest.raises(UPipeError, match=message):
        packed_segments(LAYOUT, **{"length": 16, **GOOD, **changes}, per_document=per_document)


def test_lengths_that_fit():
    for per_document in (True, False):
        segments = packed_segments(LAYOUT, 16, **GOOD, per_document=per_document)
        assert segments.documents == ((0, 5), (8, 10)) and segments.length == 16
        found = {}
        for rank in range(2):
            held = [i for half in segments.shard(rank) for i in half]
            found |= dict(zip(held, positions_in_documents(segments, rank, CPU).tolist(), strict=True))
        assert [found[i] for i in (0, 7, 8, 11, 12, 15)] == [0, 7, 0, 3, 0, 3]
    assert packed_segments(LAYOUT, 16, [0, 7, 12], [0, 7, 12], per_document=False).documents[1] == (7, 12)
