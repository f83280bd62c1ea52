"""The worker pool itself: results, failures, groups rebuilt for each case."""

import pytest
import torch
import torch.distributed as dist
from workers import WorkerFailure


def _sum_of_ranks(rank):
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    return value.item()


def _fails_on_last(rank):
    if rank == dist.get_world_size() - 1:
        raise ValueError("planted")
    return rank


@pytest.mark.parametrize("world", [1, 3, 2])
def test_ranks_reach_each_other(workers, world):
    assert workers.run(world, _sum_of_ranks) == [sum(range(world))] * world


def test_failure_names_the_rank_and_the_pool_lives_on(workers):
    with pytest.raises(WorkerFailure, match=r"rank 1 of 2[\s\S]*planted"):
        workers.run(2, _fails_on_last)
    assert workers.run(2, _sum_of_ranks) == [1.0, 1.0]
