"""How many bytes the host store will hold, and how many the host has. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_upipe.errors import UPipeError

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class WaitingBytes:
    """Of one layer and micro-batch: its input, and its attention output with lse."""

    input: int
    attention: int


def waiting_bytes(
    *, tokens: int, micro_batch: int, hidden: int, heads: int, head_dim: int, shards: int, itemsize: int
) -> WaitingBytes:
    """For ``tokens`` = s of this context-parallel rank, ``heads`` = H of this tensor-parallel rank, inputs sharded over
    ``shards`` ranks by sequence parallelism. lse is fp32 (fp64 for fp64), one number a token and head."""
    rows = tokens * micro_batch
    lse = rows * heads * max(4, itemsize)
    return WaitingBytes(rows // shards * hidden * itemsize, rows * heads * head_dim * itemsize + lse)


def store_bytes(layer: WaitingBytes, keeps: Sequence[bool], checkpoint_every: int, in_flight: int) -> int:
    """What the host store holds at most, for a pipeline stage whose layers keep attention or not as in ``keeps`` and
    that has forwarded ``in_flight`` micro-batches before the first backward."""
    if not keeps:
        return 0
    inputs = -(-len(keeps) // checkpoint_every)
    waiting = in_flight * (inputs * layer.input + sum(keeps) * layer.attention)
    # backward makes again the inputs between two kept ones, and their attention
    groups = [keeps[i : i + checkpoint_every] for i in range(0, len(keeps), checkpoint_every)]
    again = max((len(group) - 1) * layer.input + group.count(False) * layer.attention for group in groups)
    return waiting + again


def available_bytes(cgroup: Path = CGROUP) -> int:
    """Free memory of this machine for this process, with the limit of its control group (SLURM sets one)."""
    free = psutil.virtual_memory().available
    for maximum, current, stat, inactive in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        try:
            limit, used = (int((cgroup / name).read_text()) for name in (maximum, current))
            lines = (line.split() for line in (cgroup / stat).read_text().splitlines())
            cache = next((int(value) for key, value in lines if key == inactive), 0)
        except (OSError, ValueError):  # no such file, or "max"
            continue
        free = min(free, limit - used + cache)
    return max(free, 0)


def check_hosts(needs: Sequence[tuple[str, int, int]]) -> None:
    """``needs``: of every rank its host's name, the bytes its store will hold and those that the host has available.

    Raises UPipeError for the host that lacks most, the same on every rank that is given the same ``needs``.
    """
    hosts: dict[str, tuple[int, int, int]] = {}
    for host, needed, available in needs:
        ranks, total, free = hosts.get(host, (0, 0, available))
        hosts[host] = ranks + 1, total + needed, min(free, available)
    host, (ranks, total, free) = max(hosts.items(), key=lambda item: item[1][1] - item[1][2])
    if total > free:
        raise UPipeError(
            f"--upipe-offload host needs {total:,} bytes of host memory for {ranks} ranks on {host}, which has "
            f"{free:,} bytes available; lower --upipe-keep-attention or raise --upipe-checkpoint-every"
        )
