"""Bytes of the host store before a run, and those that the host has."""

import pytest

from megatron_upipe.errors import UPipeError
from megatron_upipe.memory.host_need import WaitingBytes, available_bytes, check_hosts, store_bytes, waiting_bytes

LAYER = WaitingBytes(input=100, attention=10)


def test_llama_8b_at_8m_tokens_on_16_gpus():
    """The paper's case: 4 GiB a layer input (facts, section 4), the output as much, and lse of 32 heads."""
    layer = waiting_bytes(
        tokens=8 * 2**20 // 16, micro_batch=1, hidden=4096, heads=32, head_dim=128, shards=1, itemsize=2
    )
    assert layer == WaitingBytes(2**32, 2**32 + 2**19 * 32 * 4)
    assert store_bytes(layer, [False] * 32, 1, 1) == 32 * layer.input + layer.attention


@pytest.mark.parametrize(
    ("keeps", "every", "in_flight", "wanted"),
    [
        ([True] * 4, 1, 1, 440),
        ([True] * 4, 1, 3, 1320),
        ([False] * 4, 1, 1, 400 + 10),
        ([False, False, True, True], 1, 2, 2 * 420 + 10),
        ([False] * 4, 2, 1, 200 + 100 + 20),
        ([True] * 5, 2, 1, 300 + 50 + 100),
        ([False] * 4, 4, 2, 200 + 300 + 40),
        ([], 1, 1, 0),
    ],
)
def test_store_bytes(keeps, every, in_flight, wanted):
    assert store_bytes(LAYER, keeps, every, in_flight) == wanted


def test_control_group_limits(tmp_path):
    free = available_bytes(tmp_path / "none")
    assert free > 0
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 500\n")
    assert available_bytes(tmp_path) == 2500
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) == pytest.approx(free, rel=0.5)


def test_hosts_share_their_memory():
    check_hosts([("a", 50, 100), ("a", 50, 100), ("b", 30, 40)])
    with pytest.raises(UPipeError, match=r"needs 120 bytes of host memory for 2 ranks on a, which has 100 bytes") as e:
        check_hosts([("a", 60, 101), ("b", 30, 40), ("a", 60, 100)])
    assert "--upipe-keep-attention" in str(e.value) and "--upipe-checkpoint-every" in str(e.value)
