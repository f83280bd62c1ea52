"""``megatron-upipe fit``: a training command line as a scenario, and what it is refused for."""

import shlex

import pytest

from megatron_upipe import cli
from megatron_upipe.errors import UPipeError
from megatron_upipe.planning.fit_command import scenario_of_flags
from megatron_upipe.planning.models import PRESETS
from megatron_upipe.planning.scenario import Scenario
from megatron_upipe.planning.training_flags import training_flags

MODEL = shlex.split(
    """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --bf16 --vocab-size 128256 --rotary-base 500000 --swiglu
    --untie-embeddings-and-output-weights"""
)
LONG = ["--seq-length", "131072", "--context-parallel-size", "8"]


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(PRESETS["llama3-8b"], gpus=8, tokens=2**20, ulysses=4, ring=2, keep_attention=3, sharding="ddp"),
        Scenario(PRESETS["llama3-8b"], gpus=16, tokens=2**21, ulysses=8, ring=1, tensor_parallel=2, offload="none"),
        Scenario(PRESETS["llama3-8b"], gpus=8, tokens=2**20, ulysses=8, checkpoint_every=4, optimizer_on_host=True),
    ],
)
def test_what_plan_prints_is_read_back(scenario):
    found, notes = scenario_of_flags([*MODEL, *training_flags(scenario)], scenario.gpus, 8)
    assert notes == []
    for name in ("tokens", "sizes", "offload", "checkpoint_every", "sharding", "tensor_parallel", "optimizer_on_host"):
        assert getattr(found, name) == getattr(scenario, name), name
    assert found.layers_kept == scenario.layers_kept and found.schedule == scenario.schedule
    assert found.states == scenario.states


def test_notes_say_what_is_taken_otherwise():
    _, notes = scenario_of_flags([*MODEL, *LONG, "--fp8-format", "hybrid"], 16, 8)
    assert "one of 2 data-parallel replicas is simulated" in notes[0] and "in 16 bits" in notes[1]


@pytest.mark.parametrize(
    ("flags", "gpus", "message"),
    [
        (MODEL, 8, "no --seq-length; add it"),
        ([*MODEL, *LONG, "--micro-batch-size", "2"], 8, "--micro-batch-size 2 is not simulated; the nearest is 1"),
        ([*MODEL, *LONG], 12, "--gpus 12 is no multiple of the 8 ranks of a model; the nearest is 8"),
        ([*MODEL, *LONG, "--hybrid-layer-pattern", "*-"], 8, "only GPT models are simulated"),
        ([*MODEL, *LONG, "--upipe-keep-attention", "some"], 8, "--upipe-keep-attention some is not a number of layers"),
        (
            [*MODEL, *LONG, "--upipe-keep-atention", "1"],
            8,
            "unknown flag --upipe-keep-atention; the nearest .* is --up",
        ),
        ([flag for flag in MODEL if flag != "--bf16"] + LONG, 8, "no --bf16, the only precision"),
        (
            [*MODEL, *LONG, "--hierarchical-context-parallel-sizes", "4"],
            8,
            "sizes 4: P x R has to be .* nearest is 8 1",
        ),
        ([*MODEL, *LONG, "--use-megatron-fsdp"], 8, "no_shard .* is not simulated; the nearest is optim_grads_params"),
        ([*MODEL, *LONG], 0, "--gpus 0 is too small; the least is 1"),
        ([*LONG, "--bf16"], 8, "the command line has no --num-layers; add it"),
        ([*MODEL, "--seq-length", "8K"], 8, "argument --seq-length: invalid int value: '8K'"),
    ],
)
def test_refused(flags, gpus, message):
    with pytest.raises(UPipeError, match=message):
        scenario_of_flags(flags, gpus, 8)


def test_exit_status_says_whether_it_fits(capsys):
    small = [*MODEL, "--seq-length", "16384", "--context-parallel-size", "2", "--use-megatron-fsdp"]
    small += ["--use-distributed-optimizer", "--num-layers", "2", "--bf16"]
    small += ["--data-parallel-sharding-strategy", "optim_grads_params"]
    assert cli.main(["fit", "--gpus", "2", "--gpu-memory", "60", "--", *small]) == 0
    assert "fits in 60 GiB less 6 of reserve" in capsys.readouterr().out
    assert cli.main(["fit", "--gpus", "2", "--gpu-memory", "7", "--json", "--", *small]) == 1
    assert '"fits": false' in capsys.readouterr().out
    assert cli.main(["fit", "--gpus", "2", "--", *small, "--upipe-keep-attention", "5"]) == 2
    assert "error: --upipe-keep-attention 5 is more than the 2 layers" in capsys.readouterr().err
