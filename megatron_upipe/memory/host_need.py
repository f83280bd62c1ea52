"""How many bytes the host store will hold, and how many the host has. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def gradients_wait(activation: int, parameters: int) -> bool:
    """Whether a gradient may still be shared out while a layer of ``parameters`` runs backward: time counts for more
    than memory where the layer's input, of ``activation`` bytes, is smaller than its gradients in fp32."""
    return activation < 4 * parameters


def chunk_bytes(layer: WaitingBytes, keeps: Sequence[bool], checkpoint_every: int) -> tuple[int, int]:
    """What one micro-batch leaves in the host store in a model chunk whose layers keep attention or not as in
    ``keeps``, and what its backward adds at most."""
    groups = [keeps[i : i + checkpoint_every] for i in range(0, len(keeps), checkpoint_every)]
    waiting = more = 0
    for group in groups:  # backward begins with the last one, and comes to the others with less waiting behind them
        share = layer.input + sum(group) * layer.attention
        # made again: the inputs after the kept one, and attention that was not kept
        again = (len(group) - 1) * layer.input + group.count(False) * layer.attention
        waiting, more = waiting + share, max(more - share, again)
    return waiting, max(more, 0)


def store_bytes(chunks: Sequence[tuple[int, int]], order: Sequence[int], warmup: int) -> int:
    """What the host store holds at most on a pipeline stage.

    ``chunks``: ``chunk_bytes`` of the stage's model chunks; ``order``: of which chunk each forward pass of a step is.
    The first ``warmup`` of them come before the first backward pass, then they alternate; backward passes take the
    chunks in the same order but from the last one (Megatron's schedules).
    """
    most = held = 0
    backward = [len(chunks) - 1 - chunk for chunk in order]
    for step in range(len(order) + warmup):
        if step < len(order):
            held += chunks[order[step]][0]
            most = max(most, held)
        if step >= warmup:
            waiting, again = chunks[backward[step - warmup]]
            most = max(most, held + again)
            held -= waiting
    return most


def available_bytes(root: Path = CGROUP, memberships: Path = Path("/proc/self/cgroup")) -> int:
    """Free memory of this machine for this process, within the limits of its control groups (SLURM sets them).

    ``root`` is where control groups are mounted, version 1 or 2; a group is bound by its ancestors, too.
    """
    free = psutil.virtual_memory().available
    for folder, (maximum, current, cache) in _control_groups(root, memberships):
        try:
            limit, used = (int((folder / name).read_text()) for name in (maximum, current))
            lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
            reclaimable = next((int(value) for key, value in lines if key == cache), 0)
        except (OSError, ValueError):  # no such file, or "max"
            continue
        free = min(free, limit - used + reclaimable)
    return max(free, 0)


def _control_groups(root: Path, memberships: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Folders of this process's memory groups and their ancestors, with the names of their files and of the cache."""
    try:
        lines = [line.split(":", 2) for line in memberships.read_text().splitlines()]
    except OSError:
        lines = []
    version1, version2 = root / "memory", root
    found = [(version2, "/", _VERSION_2), (version1, "/", _VERSION_1)]  # in a container the group is the root
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            found.append((version1, path, _VERSION_1))
        elif not controllers:
            found.append((version2, path, _VERSION_2))
    for base, path, names in found:
        folder = base / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(base):
                yield group, names


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


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
