"""A rank is killed in the middle of a run with the host store: the other ends, and a restart repeats the losses."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from end_to_end.training import MODEL, TRAINING, train

FLAGS = ["--spec", "megatron_upipe.layer_specs", "upipe_layer_spec", "--context-parallel-size", "2"]
FLAGS += ["--upipe-offload", "host", "--upipe-keep-attention", "1"]
MANY = ["--train-iters", "400", "--lr-decay-iters", "400", "--eval-interval", "400"]


def start_ranks(folder, *flags):
    """Two ranks without torchrun, which would end the second one itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "megatron_upipe.run", *MODEL, *TRAINING, *flags]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    logs = [(folder / f"rank {rank}.log").open("w") for rank in range(2)]
    return [
        subprocess.Popen(
            command,
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,  # Megatron's checkpoint workers outlive a killed rank
        )
        for rank in range(2)
    ]


def train_until(folder, iterations, *flags):
    """Two ranks training, with their metrics file, when so many iterations are done."""
    metrics = folder / "lost.jsonl"
    common = [*FLAGS, "--use-distributed-optimizer", "--data-cache-path", str(folder / "cache")]
    ranks = start_ranks(folder, *common, *MANY, "--upipe-metrics", str(metrics), *flags)
    deadline = time.monotonic() + 120
    while not metrics.exists() or len(metrics.read_text().splitlines()) < iterations:
        if time.monotonic() > deadline or ranks[0].poll() is not None:
            end(ranks)
            raise AssertionError((folder / "rank 0.log").read_text()[-3000:])
        time.sleep(0.02)
    return ranks, metrics


def end(ranks):
    for process in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_a_killed_rank(tmp_path):
    """The other rank ends, and a restart from the last checkpoint repeats the losses that had come after it."""
    saved, last = tmp_path / "checkpoint", 20
    ranks, metrics = train_until(tmp_path, last + 6, "--save", str(saved), "--save-interval", str(last))
    try:
        ranks[1].send_signal(signal.SIGKILL)
        assert ranks[0].wait(timeout=75) != 0
    finally:
        end(ranks)
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = {r["iteration"]: r["lm loss"] for r in records if "lm loss" in r}
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == str(last) and max(losses) < 2 * last
    stop = ["--exit-interval", str(last + 6)]
    again = train(tmp_path, "again", 2, *FLAGS, *MANY, "--load", str(saved), *stop)
    after = range(last + 1, last + 7)
    assert [again[f"lm loss {i}"] for i in after] == [losses[i] for i in after]


@pytest.mark.slow
def test_a_rank_that_hangs(tmp_path):
    """It neither answers nor closes its connections: the other ends with the timeout of the process group."""
    ranks, _ = train_until(tmp_path, 3, "--distributed-timeout-minutes", "1")
    try:
        ranks[1].send_signal(signal.SIGSTOP)
        started = time.monotonic()
        assert ranks[0].wait(timeout=120) != 0
        assert 50 < time.monotonic() - started < 110, "a minute"
    finally:
        end(ranks)
