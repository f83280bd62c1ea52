"""``megatron-upipe selftest``: passes here, catches planted faults, refuses what it cannot test."""

import json
import subprocess
import sys

import pytest
from faults import FAULTS

from megatron_upipe import cli
from megatron_upipe.errors import UPipeError
from megatron_upipe.integration.selftest import bandwidth, report
from megatron_upipe.integration.selftest.shapes import MODELS, trials

HEADS = dict(heads=8, kv_heads=2, head_dim=8, mebibytes=1, progress=False)


def _run(rank, plan, fault):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(bandwidth, "REPEATS", 1)
        if fault is not None:
            FAULTS[fault].plant(monkeypatch)
        return report.run(plan, **HEADS)


@pytest.mark.slow
def test_passes_and_measures_bandwidth(workers):
    plan = trials(8, 2, 4)
    assert {t.tp for t in plan} == {1, 2} and {t.precision for t in plan} == {"fp64", "bf16"}
    reports = workers.run(4, _run, plan, None)
    assert all(r.good for r in reports), reports[0].table()
    assert reports[0].rows == reports[3].rows, "the verdict is the same on all ranks"
    assert set(reports[0].bandwidth) == {"P 1 x R 4", "P 2 x R 2", "P 4 x R 1"}
    assert set(reports[0].bandwidth["P 2 x R 2"]) == {"exchange", "ring"}
    assert f"{len(plan)} of {len(plan)} passed on 4 x cpu" in reports[0].table()
    assert json.loads(json.dumps(reports[0].json()))["good"] is True


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(workers, fault):
    planted = FAULTS[fault]
    layout = (planted.tp, planted.p, planted.r, planted.heads_per_stage)
    trial = next(t for t in trials(8, 2, 4) if (t.tp, t.p, t.r, t.heads_per_stage) == layout)
    assert workers.run(4, _run, [trial], None)[0].good
    found = workers.run(4, _run, [trial], fault)
    assert not any(r.good for r in found), found[0].table()
    assert "FAILED" in found[0].table() and "0 of 1 passed" in found[0].table()


def test_trials_cover_the_models_and_refuse_the_rest():
    for heads, kv_heads, _ in MODELS.values():
        for world in (2, 4, 8, 16):
            plan = trials(heads, kv_heads, world)
            assert all(t.tp * t.p * t.r == world for t in plan) and len(set(plan)) == len(plan)
    with pytest.raises(UPipeError, match="no UPipe layout fits 8 query heads and 2 KV heads on 1 ranks"):
        trials(8, 2, 1)


@pytest.mark.slow
def test_command_line(capsys):
    command = [sys.executable, "-m", "megatron_upipe.cli", "selftest", "--cpu-ranks", "2", "--heads", "4"]
    command += ["--head-dim", "8"]
    done = subprocess.run(
        [*command, "--kv-heads", "2", "--json"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)  # and nothing else
    assert found["good"] and found["world"] == 2 and found["rows"][0]["dx"][1] == 1e-10
    assert cli.main(["selftest"]) == 2
    assert "run it under torchrun, or pass --cpu-ranks 4" in capsys.readouterr().err


def _other_plan(rank):
    with pytest.raises(UPipeError, match="plans other work than rank"):
        report.run(trials(8, 2, 2)[rank:], **HEADS)
    return True


def test_ranks_with_different_plans_are_told(workers):
    assert workers.run(2, _other_plan) == [True, True]


def _nan(rank):
    """NaN on the last rank only."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        original = report.parity.compare_low_precision

        def compare(*args):
            found = original(*args)
            return {name: (float("nan"), allowed) for name, (_, allowed) in found.items()} if rank else found

        monkeypatch.setattr(report.parity, "compare_low_precision", compare)
        monkeypatch.setattr(bandwidth, "REPEATS", 1)
        plan = [t for t in trials(8, 2, 2) if t.precision == "bf16"][:1]
        return report.run(plan, **HEADS)


def test_nan_on_one_rank_fails_on_all(workers):
    for found in workers.run(2, _nan):
        assert not found.good and found.rows[0].problem.startswith("output, dx")
