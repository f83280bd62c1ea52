"""The process groups of one context-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_upipe.context.layout import SequenceLayout
from megatron_upipe.errors import UPipeError


@dataclass(frozen=True)
class ContextGroups:
    """Ulysses group (P consecutive context-parallel ranks) and ring group (R ranks, stride P) of this rank.

    A group of size 1 may be None. Owned by whoever created the groups (Megatron); never destroyed here.
    """

    layout: SequenceLayout
    ulysses: dist.ProcessGroup | None
    ring: dist.ProcessGroup | None

    @property
    def ulysses_rank(self) -> int:
        return 0 if self.ulysses is None else self.ulysses.rank()

    @property
    def ring_rank(self) -> int:
        return 0 if self.ring is None else self.ring.rank()

    def connect(self, device: torch.device) -> None:
        """Makes the ring's connections. Collective over the ring: later, not every rank takes part in every step."""
        if self.ring is not None:
            dist.all_reduce(torch.zeros(1, device=device), group=self.ring)

    @property
    def rank(self) -> int:
        """Context-parallel rank: ring_rank * P + ulysses_rank."""
        return self.ring_rank * self.layout.ulysses_size + self.ulysses_rank


def context_groups(
    context: dist.ProcessGroup, hierarchical: list[dist.ProcessGroup] | None, sizes: list[int] | None
) -> ContextGroups:
    """Groups from Megatron's: the context-parallel group, and ``[P ranks, R ranks]`` if asked for.

    ``sizes`` are ``--hierarchical-context-parallel-sizes``; None means R = 1. Not collective. Raises UPipeError when
    the sizes are not two, or their product is not the context-parallel size.
    """
    size = context.size()
    if not sizes:
        return ContextGroups(SequenceLayout(size, 1), context if size > 1 else None, None)
    check_sizes(sizes, size)
    if not hierarchical:
        raise UPipeError(
            f"--hierarchical-context-parallel-sizes {sizes[0]} {sizes[1]} is set but the groups were not handed to the "
            "attention; pass a process-group collection with hcp"
        )
    ulysses, ring = hierarchical
    groups = ContextGroups(
        SequenceLayout(*sizes), ulysses if ulysses.size() > 1 else None, ring if ring.size() > 1 else None
    )
    if [ulysses.size(), ring.size()] != list(sizes) or groups.rank != context.rank():
        raise UPipeError(
            f"the hierarchical context-parallel groups have {ulysses.size()} and {ring.size()} ranks and this one is "
            f"number {groups.rank}; --hierarchical-context-parallel-sizes {sizes[0]} {sizes[1]} and rank "
            f"{context.rank()} were expected"
        )
    return groups


def check_sizes(sizes: list[int], context_parallel_size: int) -> None:
    """Raises UPipeError unless ``sizes`` is ``[P, R]`` with P*R the context-parallel size."""
    given = " ".join(map(str, sizes))
    if len(sizes) != 2:
        raise UPipeError(
            f"--hierarchical-context-parallel-sizes {given}: UPipe takes two sizes, P (Ulysses) and R (ring); "
            f"for example {context_parallel_size} 1"
        )
    p, r = sizes
    if p * r != context_parallel_size:
        nearest = max((d for d in range(1, p + 1) if context_parallel_size % d == 0), default=1)
        raise UPipeError(
            f"--hierarchical-context-parallel-sizes {given}: P*R = {p * r} is not --context-parallel-size "
            f"{context_parallel_size}; the nearest that fits is {nearest} {context_parallel_size // nearest}"
        )
