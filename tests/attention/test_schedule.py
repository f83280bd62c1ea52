"""The head schedule: each head once, each with its KV head, every illegal request named."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_upipe.attention.schedule import head_schedule, legal_heads_per_stage
from megatron_upipe.errors import UPipeError


@st.composite
def schedules(draw):
    k, g, p = draw(st.sampled_from([1, 2, 3, 4, 6, 8])), draw(st.integers(1, 12)), draw(st.integers(1, 12))
    legal = legal_heads_per_stage(k * g, k, p)
    if not legal:
        return (k * g, k, p), None
    return (k * g, k, p), head_schedule(k * g, k, p, draw(st.sampled_from(legal)))


@given(schedules())
def test_each_query_head_once_with_its_kv_head(drawn):
    (h, k, p), schedule = drawn
    if schedule is None:
        return
    seen = []
    for stage in schedule.stages:
        for rank in range(p):
            queries, keys = schedule.queries(stage, rank), schedule.keys(stage.block, rank)
            assert len(queries) == schedule.heads_per_rank and len(keys) == schedule.kv_per_rank
            # the kernel pairs heads in equal runs
            run = len(queries) // len(keys)
            assert [q // (h // k) for q in queries] == [key for key in keys for _ in range(run)]
            seen += queries
    assert sorted(seen) == list(range(h))


@given(schedules())
def test_kv_blocks(drawn):
    (_, k, p), schedule = drawn
    if schedule is None:
        return
    stages = schedule.stages
    held = [key for block in range(schedule.grid[0]) for rank in range(p) for key in schedule.keys(block, rank)]
    assert sorted(held) == sorted(list(range(k)) * schedule.copies)
    assert sum(s.begins_block for s in stages) == sum(s.ends_block for s in stages) == schedule.grid[0]
    for before, after in pairwise(stages):
        assert after.begins_block == (after.block != before.block) == before.ends_block


@given(schedules())
def test_u_runs_from_p_to_h(drawn):
    (h, k, p), schedule = drawn
    if schedule is None:
        assert h % p or (k % p and (p % k or (h // k) % (p // k)))
        return
    legal = legal_heads_per_stage(h, k, p)
    assert legal[0] == p and legal[-1] == h
    assert len(head_schedule(h, k, p, h).stages) == 1
    assert len(head_schedule(h, k, p, None).stages) == h // p


def test_paper_example():
    """16 query and 4 KV heads on 4 ranks: stage 0 sends queries 0, 4, 8, 12."""
    schedule = head_schedule(16, 4, 4, 4)
    first = schedule.stages[0]
    assert [schedule.queries(first, r) for r in range(4)] == [[0], [4], [8], [12]]
    assert [schedule.keys(0, r) for r in range(4)] == [[0], [1], [2], [3]]
    assert [s.begins_block for s in schedule.stages] == [True, False, False, False]


@pytest.mark.parametrize(
    ("h", "k", "p", "u", "message"),
    [
        (32, 8, 8, 12, r"--upipe-heads-per-stage 12 .* nearest legal value is 8 \(all: 8, 16, 32\)"),
        (12, 4, 2, 8, r"--upipe-heads-per-stage 8 .* nearest legal value is 6 \(all: 2, 6, 12\)"),
        (12, 4, 3, 3, r"P = 3 does not fit 12 query heads and 4 KV heads .*; fitting are 1, 2, 4, 12"),
        (8, 4, 16, 16, r"P = 16 does not fit 8 query heads .*; fitting are 1, 2, 4, 8"),
    ],
)
def test_refusals_name_flag_and_nearest(h, k, p, u, message):
    with pytest.raises(UPipeError, match=message):
        head_schedule(h, k, p, u)


def test_nearest_values_are_accepted():
    for arguments in ((32, 8, 8, 8), (12, 4, 2, 6), (12, 4, 2, 2), (8, 4, 8, 8)):
        assert head_schedule(*arguments).heads_per_stage == arguments[-1]
