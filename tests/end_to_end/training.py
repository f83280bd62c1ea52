"""Starts whole training runs as a user does, and reads their exact losses."""

import json
import shlex
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import forked
import pytest

MODEL = shlex.split(
    """--num-layers 2 --hidden-size 48 --ffn-hidden-size 80 --num-attention-heads 8 --group-query-attention
    --num-query-groups 4 --seq-length 96 --max-position-embeddings 96 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0"""
)
TRAINING = shlex.split(
    """--mock-data --tokenizer-type NullTokenizer --vocab-size 256 --micro-batch-size 2 --global-batch-size 4
    --lr 5e-3 --min-lr 5e-4 --lr-decay-style cosine --lr-decay-iters 8 --train-iters 5 --eval-interval 5
    --eval-iters 1 --log-interval 1"""
)


def launch(ranks: int, *flags: str, script: str | None = None, launcher: bool = True) -> forked.Done:
    """``-m megatron_upipe.run``, or the script without the launcher; the caller looks at the exit status."""
    module = ["-m", "megatron_upipe.run"] if launcher else []
    return forked.run(ranks, [*module, *([script] if script else []), *flags])


def torchrun(ranks: int, *flags: str) -> subprocess.CompletedProcess:
    """``torchrun -m megatron_upipe.run`` itself, with interpreters of its own; the caller looks at the exit status."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "megatron_upipe.run", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def train(
    folder: Path,
    name: str,
    ranks: int,
    *flags: str,
    script: str | None = None,
    launcher: bool = True,
    distributed_optimizer: bool = True,
    mock_data: bool = True,
) -> dict[str, float]:
    """Trains the small model; ``{"lm loss 1": ..., "grad norm 1": ..., "validation lm loss 5": ...}``."""
    if distributed_optimizer:
        flags = (*flags, "--use-distributed-optimizer")
    metrics = folder / f"{name}.jsonl"
    cache = folder / "cache"
    training = [flag for flag in TRAINING if mock_data or flag != "--mock-data"]
    arguments = (*MODEL, *training, *flags, "--data-cache-path", str(cache), "--upipe-metrics", str(metrics))
    done = launch(ranks, *arguments, script=script, launcher=launcher)
    if {-signal.SIGABRT, -signal.SIGSEGV} & set(done.statuses):
        # gloo's own threads abort or fault about once in 100 runs, stock Megatron's included
        warnings.warn(f"{name}: a rank died by a signal, and is started once more: {done.stderr[-600:]}", stacklevel=2)
        metrics.unlink(missing_ok=True)
        done = launch(ranks, *arguments, script=script, launcher=launcher)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found = {}
    for line in metrics.read_text().splitlines():
        record = json.loads(line)
        found |= {
            f"{key} {record['iteration']}": value for key, value in record.items() if "loss" in key or "norm" in key
        }
    return found


def some_slow(values: Iterable[Any], *slow: Any) -> list[Any]:
    """For ``parametrize``: of the ``values`` those that others cover in part are left to ``make test-slow``."""
    several = [value if isinstance(value, tuple) else (value,) for value in values]
    marked = [value if isinstance(value, tuple) else (value,) for value in slow]
    return [pytest.param(*value, marks=pytest.mark.slow if value in marked else ()) for value in several]
