"""Planted faults: each is caught by the parity comparison, which passes without it."""

import pytest
from faults import FAULTS

from megatron_upipe.integration.selftest.parity import TOLERANCE, Case, compare, initialize, single_rank_groups


def _run(rank, name, plant):
    fault = FAULTS[name]
    initialize(fault.p, fault.r, fault.tp)
    groups = single_rank_groups()
    case = Case(heads=8, kv_heads=2, heads_per_stage=fault.heads_per_stage, chunk=4)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if plant:
            fault.plant(monkeypatch)
        return compare(case, fault.p, fault.r, groups, fault.tp, sp=fault.tp > 1)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(workers, name):
    fault = FAULTS[name]
    world = fault.tp * fault.p * fault.r
    assert all(max(errors.values()) <= TOLERANCE for errors in workers.run(world, _run, name, False))
    bad = workers.run(world, _run, name, True)
    assert max(errors[fault.shows_in] for errors in bad) > 1e-3, bad


def test_unsummed_dk_leaves_the_output_right(workers):
    """Only a comparison of weight gradients sees it."""
    assert all(errors["output"] <= TOLERANCE for errors in workers.run(4, _run, "unsummed dK", True))
