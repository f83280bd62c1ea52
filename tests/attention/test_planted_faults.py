"""Planted faults: each is caught by the parity comparison, which passes without it."""

import pytest
import torch

from megatron_upipe.attention import core
from megatron_upipe.context import exchange, ring
from megatron_upipe.integration.selftest.parity import TOLERANCE, Case, compare, initialize, single_rank_groups

CASE = Case(heads=12, kv_heads=4, heads_per_stage=6)
REPLICATED = Case(heads=8, kv_heads=1, heads_per_stage=4)


def swap_heads(monkeypatch):
    """What comes back from the exchange goes to the neighbouring head."""
    monkeypatch.setattr(core, "to_sequence", lambda t, group: exchange.to_sequence(t, group).roll(1, dims=2))


def forget_zigzag(monkeypatch):
    """Backs are taken in rising instead of falling order of the rank."""

    def to_heads(shard, group):
        p = 1 if group is None else group.size()
        s, b, n, d = shard.shape
        received = exchange._all_to_all(shard.view(s, b, p, n // p, d).permute(2, 0, 1, 3, 4), group)
        both = received.view(p, 2, s // 2, b, n // p, d).permute(3, 4, 1, 0, 2, 5)
        return both.reshape(b, n // p, p * s, d)

    monkeypatch.setattr(core, "to_heads", to_heads)


def drop_ring_step(monkeypatch):
    """The last ring step's attention is left out of the forward."""
    original, calls = ring.merge_, []

    def merge_(*args):
        calls.append(1)
        if len(calls) % 2:
            original(*args)

    monkeypatch.setattr(ring, "merge_", merge_)


def forget_to_sum_copies(monkeypatch):
    """dK and dV of a KV head that two ranks attend are taken from the first only."""
    original = torch.Tensor.sum

    def first(self, dim=None, keepdim=False, dtype=None):
        if dim == 3 and keepdim:
            return self[:, :, :, :1].to(dtype)
        return original(self) if dim is None else original(self, dim, keepdim=keepdim, dtype=dtype)

    monkeypatch.setattr(torch.Tensor, "sum", first)


FAULTS = {
    "head swap": (swap_heads, 2, 2, CASE, "output"),
    "zigzag order": (forget_zigzag, 2, 2, CASE, "output"),
    "dropped ring step": (drop_ring_step, 1, 3, CASE, "output"),
    "unsummed dK": (forget_to_sum_copies, 4, 1, REPLICATED, "linear_qkv.weight"),
}


def _run(rank, p, r, case, fault):
    initialize(p, r)
    groups = single_rank_groups()
    with pytest.MonkeyPatch.context() as monkeypatch:
        if fault is not None:
            FAULTS[fault][0](monkeypatch)
        return compare(case, p, r, groups)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(workers, fault):
    _, p, r, case, where = FAULTS[fault]
    good = workers.run(p * r, _run, p, r, case, None)
    assert all(max(errors.values()) <= TOLERANCE for errors in good)
    bad = workers.run(p * r, _run, p, r, case, fault)
    assert max(errors[where] for errors in bad) > 1e-3, bad


def test_unsummed_dk_leaves_the_output_right(workers):
    """Only a comparison of weight gradients sees it."""
    bad = workers.run(4, _run, 4, 1, REPLICATED, "unsummed dK")
    assert all(errors["output"] <= TOLERANCE for errors in bad)
