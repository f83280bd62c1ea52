"""Bytes of the host store before a run, and those that the host has."""

import pytest

from megatron_upipe.errors import UPipeError
from megatron_upipe.memory.host_need import (
    WaitingBytes,
    available_bytes,
    check_hosts,
    chunk_bytes,
    store_bytes,
    waiting_bytes,
)

LAYER = WaitingBytes(input=100, attention=10)


def test_llama_8b_at_8m_tokens_on_16_gpus():
    """The paper's case: 4 GiB a layer input (facts, section 4), the output as much, and lse of 32 heads."""
    layer = waiting_bytes(
        tokens=8 * 2**20 // 16, micro_batch=1, hidden=4096, heads=32, head_dim=128, shards=1, itemsize=2
    )
    assert layer == WaitingBytes(2**32, 2**32 + 2**19 * 32 * 4)
    assert chunk_bytes(layer, [False] * 32, 1) == (32 * layer.input, layer.attention)


@pytest.mark.parametrize(
    ("keeps", "every", "wanted"),
    [
        ([True] * 4, 1, (440, 0)),
        ([False] * 4, 1, (400, 10)),
        ([False, False, True, True], 1, (420, 0)),
        ([True, True, False, False], 1, (420, 10)),
        ([False, False, True], 2, (210, 120 - 110)),
        ([False] * 4, 2, (200, 100 + 20)),
        ([True] * 5, 2, (350, 0)),
        ([True] * 4, 2, (240, 100)),
        ([False] * 4, 4, (100, 300 + 40)),
        ([], 1, (0, 0)),
    ],
)
def test_chunk_bytes(keeps, every, wanted):
    assert chunk_bytes(LAYER, keeps, every) == wanted


@pytest.mark.parametrize(
    ("chunks", "order", "warmup", "wanted"),
    [
        ([(7, 2)], [0], 0, 9),
        ([(7, 2)], [0] * 4, 0, 9),
        ([(7, 2)], [0] * 4, 2, 3 * 7 + 2),
        ([(7, 2)], [0] * 4, 4, 4 * 7 + 2),
        ([(1, 0), (5, 0)], [0, 0, 1, 1, 0, 0, 1, 1], 3, 1 + 1 + 5 + 5),  # a backward pass of the second chunk follows
        ([(1, 0), (5, 3)], [0, 0, 1, 1], 4, 12 + 3),
    ],
)
def test_store_bytes(chunks, order, warmup, wanted):
    assert store_bytes(chunks, order, warmup) == wanted


def _write(folder, limit, used, cache, version=2):
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    key = "inactive_file" if version == 2 else "total_inactive_file"
    (folder / "memory.stat").write_text(f"anon 1\n{key} {cache}\n")


def test_control_group_limits(tmp_path):
    memberships = tmp_path / "cgroup"
    free = available_bytes(tmp_path / "none", memberships)
    assert free > 0
    _write(tmp_path, 5000, 3000, 500)
    assert available_bytes(tmp_path, memberships) == 2500, "in a container"
    _write(tmp_path, "max", 3000, 500)
    assert available_bytes(tmp_path, memberships) == pytest.approx(free, rel=0.5)


@pytest.mark.parametrize("version", [1, 2])
def test_control_group_of_a_slurm_job(tmp_path, version):
    """The limit is on an ancestor of the group that the process is in."""
    base = tmp_path / "memory" if version == 1 else tmp_path
    memberships = tmp_path / "self"
    group = "/system.slice/slurm/job_7/step_0/task_0"
    memberships.write_text(f"5:devices:/x\n4:{'cpuset,memory' if version == 1 else ''}:{group}\n")
    job = base / "system.slice/slurm/job_7"
    _write(job, 9000, 4000, 100, version)
    _write(job / "step_0/task_0", "max", 10, 0, version)
    assert available_bytes(tmp_path, memberships) == 5100


def test_hosts_share_their_memory():
    check_hosts([("a", 50, 100), ("a", 50, 100), ("b", 30, 40)])
    with pytest.raises(UPipeError, match=r"needs 120 bytes of host memory for 2 ranks on a, which has 100 bytes") as e:
        check_hosts([("a", 60, 101), ("b", 30, 40), ("a", 60, 100)])
    assert "--upipe-keep-attention" in str(e.value) and "--upipe-checkpoint-every" in str(e.value)
