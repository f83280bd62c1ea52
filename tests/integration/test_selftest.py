"""``megatron-upipe selftest``: passes here, catches planted faults, refuses what it cannot test."""

import json
import subprocess
import sys

import pytest
import torch

from megatron_upipe import cli
from megatron_upipe.attention import core, module
from megatron_upipe.attention.plan import AttentionWeights
from megatron_upipe.context import exchange, ring
from megatron_upipe.errors import UPipeError
from megatron_upipe.integration.selftest import bandwidth, report
from megatron_upipe.integration.selftest.shapes import MODELS, Trial, trials

HEADS = dict(heads=8, kv_heads=2, head_dim=8, mebibytes=1, progress=False)


def _run(rank, plan, fault):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(bandwidth, "REPEATS", 1)
        if fault is not None:
            FAULTS[fault][0](monkeypatch)
        return report.run(plan, **HEADS)


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


def _swap_heads(patch):
    patch.setattr(core, "to_sequence", lambda t, group: exchange.to_sequence(t, group).roll(1, dims=2))


def _forget_zigzag(patch):
    patch.setattr(core, "to_heads", lambda t, group: exchange.to_heads(t, group).flip(2))


def _drop_ring_step(patch):
    patch.setattr(ring, "merge_", lambda *args: None)


def _forget_copies(patch):
    original = torch.Tensor.sum

    def first(self, dim=None, keepdim=False, dtype=None):
        if dim == 3 and keepdim:
            return self[:, :, :, :1].to(dtype)
        return original(self) if dim is None else original(self, dim, keepdim=keepdim, dtype=dtype)

    patch.setattr(torch.Tensor, "sum", first)


def _read_weights_past_the_call(patch):
    def weights(self):
        return AttentionWeights(self.linear_qkv.weight, self.linear_qkv.bias, self.linear_proj.weight)

    patch.setattr(module.UPipeSelfAttention, "_weights", weights)


def _forget_reduce(patch):
    """dx is cut into shards without the sum over the tensor-parallel group."""

    def cut(self, gradient):
        return gradient.chunk(self.pg_collection.tp.size())[self.pg_collection.tp.rank()].contiguous()

    patch.setattr(module.UPipeSelfAttention, "_reduce_scatter", cut)


# fault -> (how, where it must show)
FAULTS = {
    "head swap": (_swap_heads, Trial(1, 2, 2, 2, False, "fp64")),
    "zigzag order": (_forget_zigzag, Trial(1, 2, 2, 2, False, "fp64")),
    "dropped ring step": (_drop_ring_step, Trial(1, 1, 4, 8, False, "fp64")),
    "unsummed dK": (_forget_copies, Trial(1, 4, 1, 4, False, "fp64")),
    "stale weight": (_read_weights_past_the_call, Trial(1, 2, 2, 4, False, "fp64")),
    "missing sequence-parallel reduce": (_forget_reduce, Trial(2, 2, 1, 2, True, "fp64")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(workers, fault):
    trial = FAULTS[fault][1]
    assert trial in trials(8, 2, 4) or fault == "stale weight", "the selftest tries it by itself"
    assert workers.run(4, _run, [trial], None)[0].good
    try:
        found = workers.run(4, _run, [trial], fault)
    except AssertionError:
        return  # NaN weights stop the comparison itself
    assert not any(r.good for r in found), found[0].table()
    assert "FAILED" in found[0].table() and "0 of 1 passed" in found[0].table()


def test_trials_cover_the_models_and_refuse_the_rest():
    for heads, kv_heads, _ in MODELS.values():
        for world in (2, 4, 8, 16):
            plan = trials(heads, kv_heads, world)
            assert all(t.tp * t.p * t.r == world for t in plan) and len(set(plan)) == len(plan)
    with pytest.raises(UPipeError, match="no UPipe layout fits 8 query heads and 2 KV heads on 1 ranks"):
        trials(8, 2, 1)


def test_command_line(capsys):
    command = [sys.executable, "-m", "megatron_upipe.cli", "selftest", "--cpu-ranks", "2", "--heads", "4"]
    done = subprocess.run(
        [*command, "--kv-heads", "2", "--json"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["good"] and found["world"] == 2 and found["rows"][0]["dx"][1] == 1e-10
    assert cli.main(["selftest"]) == 2
    assert "run it under torchrun, or pass --cpu-ranks 4" in capsys.readouterr().err
