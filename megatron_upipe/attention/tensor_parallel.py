"""The sums and gathers of tensor parallelism around products of this rank's part of the weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor


class TensorParallel(NamedTuple):
    """``gather`` makes an activation or gradient whole along the sequence under sequence parallelism; ``reduce`` sums
    what this rank's part of the weights made, and shards it again. Collective over the tensor-parallel group,
    identities where there is none; both may write in place."""

    gather: Callable[[Tensor], Tensor]
    reduce: Callable[[Tensor], Tensor]


def tensor_parallel(group: torch.distributed.ProcessGroup, size: int, sequence_parallel: bool) -> TensorParallel:
    """For a group of ``size`` ranks. Not collective."""
    if size == 1:
        return TensorParallel(_same, _same)
    if sequence_parallel:
        return TensorParallel(
            partial(gather_from_sequence_parallel_region, group=group),
            partial(reduce_scatter_to_sequence_parallel_region, group=group),
        )
    return TensorParallel(_same, partial(_sum, group=group))


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _sum(tensor: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    # in place; Megatron's own function returns a view, and a gradient with a view must not be written to later
    torch.distributed.all_reduce(tensor, group=group)
    return tensor
