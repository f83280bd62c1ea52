"""``examples/slurm/`` on a real Slurm: two nodes, a requeue, a time limit, a lost rank."""

import json
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest
from end_to_end.training import train
from slurm.cluster import Cluster

pytestmark = pytest.mark.slurm
EXAMPLES = Path(__file__).parents[2] / "examples" / "slurm"
DEMO = EXAMPLES / "cpu_demo.sbatch"
MANY = "400"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("slurm")


@pytest.fixture(scope="module")
def cluster(folder):
    for program in ("slurmctld", "slurmd", "munged"):
        if shutil.which(program) is None:
            pytest.fail(f"{program} is not installed; make test-slurm installs it")
    root = folder / "cluster"
    root.mkdir()
    cluster = Cluster(root, port=_free_ports(3))
    yield cluster
    cluster.close()


def _free_ports(count):
    """The first of so many neighbouring ports that nobody uses."""
    for first in range(17000, 17900, 10):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise RuntimeError("no free ports")


@pytest.fixture(scope="module")
def plain(folder):
    """The losses of the same model without Slurm, on one rank with the stock spec."""
    flags = ["--train-iters", "12", "--lr-decay-iters", "400", "--eval-interval", "100", "--eval-iters", "1"]
    return {key: value for key, value in train(folder, "plain", 1, *flags).items() if key.startswith("lm loss")}


def submit(cluster, folder, name, **environment):
    run = folder / name
    run.mkdir()
    variables = {
        "UPIPE_RUN_DIR": str(run),
        "UPIPE_FIT": "off",  # a toy
        "UPIPE_PREFLIGHT": "off",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    return cluster.submit(DEMO, run, **{**variables, **environment}), run


def losses(run):
    """Of the metrics file; an iteration that was computed twice counts once, and must have come out the same."""
    found = {}
    metrics = run / "metrics.jsonl"
    for line in metrics.read_text().splitlines() if metrics.exists() else ():
        record = json.loads(line)
        if "lm loss" in record:
            key = f"lm loss {record['iteration']}"
            assert found.setdefault(key, record["lm loss"]) == record["lm loss"], key
    return found


def assert_close(found, expected):
    assert set(expected) <= set(found), (sorted(found), sorted(expected))
    assert max(abs(found[key] - expected[key]) / expected[key] for key in expected) <= 1e-4


def out(run):
    return "".join(path.read_text() for path in run.glob("*.out"))


def test_two_nodes_with_preflight(cluster, folder, plain):
    number, run = submit(cluster, folder, "two nodes", UPIPE_PREFLIGHT="on", UPIPE_MEBIBYTES="1")
    job = cluster.finish(number)
    assert job["JobState"] == "COMPLETED", out(run) + logs(run)
    assert_close(losses(run), plain)
    assert (run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "12"
    shown = out(run)
    assert "pre-flight 2 of 2: selftest on all ranks" in shown and "iteration        1/      12" in shown
    nodes = [(run / "logs" / f"train-rank{rank}.log").read_text().split("node ")[1][:5] for rank in range(4)]
    assert nodes == ["node1", "node1", "node2", "node2"]


def test_requeued_in_the_middle(cluster, folder, plain):
    number, run = submit(cluster, folder, "requeued", DEMO_ITERATIONS=MANY)
    cluster.wait(lambda: len(losses(run)) > 6, 120)
    cluster.command("scontrol", "requeue", str(number))
    before = len(losses(run))
    cluster.wait(lambda: len(losses(run)) > before + 10, 120)
    assert cluster.job(number)["Restarts"] == "1"
    cluster.command("scancel", str(number))
    assert cluster.finish(number)["JobState"] == "CANCELLED"
    assert "training, start 2" in out(run)
    assert_close(losses(run), plain)


def test_saves_before_the_time_limit_and_queues_again(cluster, folder, plain):
    number, run = submit(cluster, folder, "limit", DEMO_ITERATIONS=MANY)
    cluster.wait(lambda: len(losses(run)) > 6, 120)
    cluster.command("scancel", "--batch", "--signal=USR1", str(number))  # what --signal=B:USR1@60 sends
    cluster.wait(lambda: cluster.job(number)["Restarts"] == "1", 60)
    before = len(losses(run))
    cluster.wait(lambda: len(losses(run)) > before + 10, 120)
    cluster.command("scancel", str(number))
    cluster.finish(number)
    assert "saved; the job queues again" in out(run)
    assert losses(run).keys() >= {f"lm loss {i}" for i in range(1, len(losses(run)) + 1)}, "an iteration is missing"
    assert_close(losses(run), plain)


def test_a_lost_rank_ends_the_job(cluster, folder):
    number, run = submit(cluster, folder, "lost", DEMO_ITERATIONS=MANY)
    cluster.wait(lambda: len(losses(run)) > 2, 120)
    os.kill(_rank(run, "2"), signal.SIGKILL)
    job = cluster.finish(number, 90)
    assert job["JobState"] == "FAILED" and job["Restarts"] == "0", out(run)
    assert not _ranks(run), "ranks were left behind"


def test_preflight_stops_what_does_not_work(cluster, folder):
    small = dict(UPIPE_PREFLIGHT="on", UPIPE_FIT="--gpu-memory 1 --reserve 0.99999", DEMO_BF16="1")
    number, run = submit(cluster, folder, "too large", **small)
    job = cluster.finish(number)
    assert job["JobState"] == "FAILED" and job["ExitCode"] == "1:0"
    assert "pre-flight failed: these flags do not fit" in out(run) and not list((run / "logs").glob("train-*"))


def _ranks(run):
    """Training processes of a run on this machine, by rank."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = dict(
                word.split("=", 1) for word in (process / "environ").read_text().split("\0") if "=" in word
            )
            command = (process / "cmdline").read_text()
        except OSError:
            continue
        if environment.get("UPIPE_RUN_DIR") == str(run) and "megatron_upipe.run" in command and "RANK" in environment:
            found[environment["RANK"]] = int(process.name)
    return found


def _rank(run, rank):
    return _ranks(run)[rank]


def logs(run):
    return "".join(path.read_text()[-3000:] for path in sorted((run / "logs").glob("*.log")))
