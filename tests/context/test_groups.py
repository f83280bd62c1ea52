"""Groups from Megatron's: P inner, R outer; wrong sizes named."""

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_upipe.context.groups import check_sizes, context_groups
from megatron_upipe.errors import UPipeError


def _groups(rank, p, r):
    parallel_state.initialize_model_parallel(context_parallel_size=p * r, hierarchical_context_parallel_sizes=[p, r])
    context = parallel_state.get_context_parallel_group()
    found = context_groups(context, parallel_state.get_hierarchical_context_parallel_groups(), [p, r])
    members = [dist.get_process_group_ranks(g) if g else [rank] for g in (found.ulysses, found.ring)]
    with pytest.raises(UPipeError, match="the groups were not handed to the attention"):
        context_groups(context, None, [p, r])
    plain = context_groups(context, None, None)
    assert (plain.layout.ulysses_size, plain.layout.ring_size, plain.rank) == (p * r, 1, context.rank())
    return found.rank, found.ulysses_rank, found.ring_rank, members


def test_ulysses_is_inner_and_ranks_come_from_groups(workers):
    """World 8 = data parallel 2 x ring 2 x Ulysses 2."""
    found = workers.run(8, _groups, 2, 2)
    assert [f[0] for f in found] == [0, 1, 2, 3] * 2
    assert [f[1:3] for f in found] == [(0, 0), (1, 0), (0, 1), (1, 1)] * 2
    assert found[5][3] == [[4, 5], [5, 7]]


@pytest.mark.parametrize(("p", "r"), [(1, 4), (4, 1)])
def test_one_size_may_be_one(workers, p, r):
    assert [f[0] for f in workers.run(4, _groups, p, r)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([4, 3], r"sizes 4 3: P\*R = 12 is not --context-parallel-size 8; the nearest that fits is 4 2"),
        ([3, 2], r"the nearest that fits is 2 4"),
        ([8], r"UPipe takes two sizes, P \(Ulysses\) and R \(ring\); for example 8 1"),
        ([2, 2, 2], r"UPipe takes two sizes"),
    ],
)
def test_sizes_are_checked(sizes, message):
    with pytest.raises(UPipeError, match=message):
        check_sizes(sizes, 8)


@pytest.mark.parametrize("sizes", [[4, 2], [2, 4], [8, 1], [1, 8]])
def test_nearest_sizes_are_accepted(sizes):
    check_sizes(sizes, 8)
