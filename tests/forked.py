"""Ranks of a run forked from a process that has torch imported: small runs spend most of their time on imports.

``run(ranks, ["-m", "megatron_upipe.run", ...])`` does what torchrun does on one node. Nothing of Megatron or of the
plug-in is imported before the fork, so that their order of imports is that of a fresh interpreter.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PRELOAD = ["torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.utils.cpp_extension"]
PRELOAD += [f"torch.distributed.{name}" for name in ("tensor", "checkpoint", "fsdp", "elastic.multiprocessing")]
PATIENCE_S = 30  # for ranks that were asked to end


@dataclass
class Done:
    """Exit statuses by rank, negative for a signal, and what all ranks wrote."""

    statuses: list[int]
    stdout: str
    stderr: str

    @property
    def returncode(self) -> int:
        failed = [status for status in self.statuses if status != 0]
        return next((status for status in failed if status != -signal.SIGTERM), failed[0] if failed else 0)


_server: subprocess.Popen | None = None


def run(ranks: int, command: list[str], timeout: float = 300) -> Done:
    """Runs ``["-m", module, *flags]`` or ``[script, *flags]`` on all ranks, in this environment and folder.

    As soon as one fails the others are asked to end. TimeoutExpired when the time is over; no rank is left behind.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, name) for name in ("stdout", "stderr")]
        job = dict(ranks=ranks, command=command, cwd=os.getcwd(), environment=dict(os.environ), timeout=timeout)
        statuses = _ask(job | dict(logs=[str(log) for log in logs]))
        stdout, stderr = (log.read_text(errors="replace") for log in logs)
        if statuses is None:
            raise subprocess.TimeoutExpired(command, timeout, stdout, stderr)
        return Done(statuses, stdout, stderr)


def _ask(job: dict) -> list[int] | None:
    global _server
    if _server is None:
        command = [sys.executable, "-W", "ignore", __file__]
        _server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        atexit.register(_server.stdin.close)  # it leaves when nobody can ask any more
    print(json.dumps(job), file=_server.stdin, flush=True)
    return json.loads(_server.stdout.readline())


def _serve() -> dict | None:
    """Answers jobs; returns None at the end, and in a forked rank what it is to run."""
    for line in sys.stdin:
        job = json.loads(line)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            job["port"] = free.getsockname()[1]
        pids = []
        for rank in range(job["ranks"]):
            pid = os.fork()
            if pid == 0:
                return job | dict(rank=rank)
            pids.append(pid)
        print(json.dumps(_wait(pids, time.monotonic() + job["timeout"])), flush=True)
    return None


def _wait(pids: list[int], deadline: float) -> list[int] | None:
    statuses: dict[int, int] = {}
    late = False
    while len(statuses) < len(pids):
        for pid in set(pids) - set(statuses):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[pid] = os.waitstatus_to_exitcode(status)
                if statuses[pid] != 0:
                    _signal(set(pids) - set(statuses), signal.SIGTERM)
                    deadline = min(deadline, time.monotonic() + PATIENCE_S)
        if time.monotonic() > deadline:
            late = late or not any(statuses.values())
            _signal(set(pids) - set(statuses), signal.SIGKILL)
        time.sleep(0.01)
    return None if late else [statuses[pid] for pid in pids]


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)  # not reaped yet, so it is still ours


def _become(job: dict) -> None:
    """Makes a forked process the rank of a job."""
    stdout, stderr = (os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for log in job["logs"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    rank, ranks = str(job["rank"]), str(job["ranks"])
    os.environ.clear()
    os.environ |= job["environment"] | dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]))
    os.chdir(job["cwd"])
    sys.path[0] = job["cwd"]
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))


def _run(command: list[str]) -> None:
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    for name in PRELOAD:
        __import__(name)
    mine = _serve()
    if mine is not None:
        _become(mine)
        _run(mine["command"])
