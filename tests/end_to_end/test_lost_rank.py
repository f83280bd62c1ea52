"""A rank is killed in the middle of a run with the host store: the other ends, and a restart repeats the losses."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

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
        )
        for rank in range(2)
    ]


def test_a_killed_rank(tmp_path):
    metrics, saved = tmp_path / "killed.jsonl", tmp_path / "checkpoint"
    common = [*FLAGS, "--use-distributed-optimizer", "--data-cache-path", str(tmp_path / "cache")]
    ranks = start_ranks(
        tmp_path,
        *common,
        *MANY,
        *("--save", str(saved), "--save-interval", "2", "--upipe-metrics", str(metrics)),
        *("--distributed-timeout-minutes", "1"),
    )
    try:
        deadline = time.monotonic() + 120
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 5:
            assert time.monotonic() < deadline and ranks[0].poll() is None, (tmp_path / "rank 0.log").read_text()[
                -3000:
            ]
            time.sleep(0.02)
        ranks[1].send_signal(signal.SIGKILL)
        started = time.monotonic()
        assert ranks[0].wait(timeout=75) != 0
        assert time.monotonic() - started < 75, "the timeout of the process group is a minute"
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = {r["iteration"]: r["lm loss"] for r in records if "lm loss" in r}
    last = int((saved / "latest_checkpointed_iteration.txt").read_text())
    assert 2 <= last < 400
    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    again = train(tmp_path, "again", 2, *FLAGS, *MANY, "--load", str(saved), "--exit-interval", "5")
    assert {f"lm loss {i}": losses[i] for i in (3, 4, 5)} == {
        k: again[k] for k in ("lm loss 3", "lm loss 4", "lm loss 5")
    }
