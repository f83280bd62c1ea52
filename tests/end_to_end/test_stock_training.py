"""Megatron's own training loop on the CPU stand-in, as a user starts it."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from end_to_end.training import MODEL, TRAINING, launch, train

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stock")


@pytest.fixture(scope="module")
def one_rank(folder):
    return train(folder, "one", 1)


def assert_close(found, expected, relative):
    assert set(found) == set(expected)
    worst = max(abs(found[key] - expected[key]) / abs(expected[key]) for key in expected)
    assert worst <= relative, (worst, found, expected)


def test_trains_and_evaluates(one_rank):
    assert one_rank["lm loss 5"] < 0.9 * one_rank["lm loss 1"]
    assert {"validation lm loss 5", "test lm loss 5", "grad norm 5"} <= set(one_rank)


@pytest.mark.slow
def test_tensor_and_sequence_parallel_agree_with_one_rank(folder, one_rank):
    two = train(folder, "tp2", 2, "--tensor-model-parallel-size", "2", "--sequence-parallel")
    assert_close(two, one_rank, 1e-4)


DROPOUT = ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
LAYOUTS = {
    "1 rank, dropout": (1, DROPOUT),
    "data parallel, overlapped": (2, ["--overlap-grad-reduce", "--overlap-param-gather"]),
    "tensor parallel, dropout": (2, ["--tensor-model-parallel-size", "2", *DROPOUT]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_resumed_run_repeats_the_losses_bit_for_bit(folder, name):
    ranks, flags = LAYOUTS[name]
    checkpoint = str(folder / f"checkpoint {name}")
    straight = train(folder, f"straight {name}", ranks, *flags, "--save", checkpoint, "--save-interval", "2")
    Path(checkpoint, "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(folder, f"resumed {name}", ranks, *flags, "--load", checkpoint)
    assert {"lm loss 3", "grad norm 5", "test lm loss 5"} <= set(resumed) and "lm loss 2" not in resumed
    assert resumed == {key: straight[key] for key in resumed}


def test_refusal_is_one_sentence():
    done = launch(2, *MODEL, *TRAINING, "--transformer-impl", "transformer_engine")
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if line.startswith("megatron_upipe: error")]
    assert ours == ["megatron_upipe: error: --transformer-impl transformer_engine needs a GPU; on a CPU it is local"]
    assert "[rank0]" not in done.stderr, "a refusal must not end in a traceback"


def test_readme_commands_run():
    """Every command in the README's indented blocks that starts a training run."""
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    commands = [line.strip() for line in text.splitlines() if line.startswith("    .venv/bin/torchrun")]
    assert commands
    for command in commands:
        words = shlex.split(command.replace(".venv/bin/torchrun", f"{sys.executable} -m torch.distributed.run"))
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, command + done.stdout[-2000:] + done.stderr[-4000:]
        assert "validation loss at iteration 4" in done.stdout
