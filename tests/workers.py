"""A persistent pool of gloo workers for multi-process tests.

Importing torch and Megatron takes seconds, so the processes are forked once from a server that has imported them, and
live as long as the test session. Each case builds its own process group and destroys it.

A case is a module-level function ``case(rank, *args)``; it runs on ranks 0..world-1 and returns something picklable.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

PRELOAD = ["torch", "megatron.core.parallel_state", "megatron.core.models.gpt.gpt_model", "megatron_upipe", "workers"]
GLOO_TIMEOUT = timedelta(seconds=60)
CASE_TIMEOUT_S = 240
CASES_BEFORE_RENEWAL = 12  # Megatron keeps groups of destroyed worlds, with threads; hundreds slow everything down


class WorkerFailure(AssertionError):
    """One or more ranks raised; the message has their tracebacks."""


def _serve(connection: Any, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from megatron_upipe.integration import cpu

    torch.set_num_threads(1)
    cpu.install()
    gc.freeze()  # what was imported stays: each collection would visit it all
    while True:
        try:
            job = connection.recv()
        except EOFError:  # the test session is over
            return
        case, world, store, args = job
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        state = "unconnected"
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=GLOO_TIMEOUT
            )
            state = "failed"
            try:
                result = case(rank, *args)
            finally:
                gc.collect()  # models hold groups in cycles
                _forget_groups()
            connection.send(("done", result))
        except BaseException:
            connection.send((state, traceback.format_exc()))


def _forget_groups() -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


class WorkerPool:
    """``run(world, case, *args)`` returns the ranks' results in order; WorkerFailure if any rank raised or hung."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._workers: list[tuple[Any, Any]] = []
        self._cases = 0

    def run(self, world: int, case: Callable, *args: Any) -> list[Any]:
        states, results = self._run(world, case, *args)
        if "unconnected" in states:
            # gloo's meeting of the ranks fails about once in a thousand cases
            warnings.warn(f"ranks did not meet, and start once more: {states}", stacklevel=2)
            self.close()
            states, results = self._run(world, case, *args)
        failures = [
            f"rank {rank} of {world}:\n{result}"
            for rank, (state, result) in enumerate(zip(states, results, strict=True))
            if state != "done"
        ]
        if failures:
            raise WorkerFailure(f"{len(failures)} of {world} ranks failed; the first:\n{failures[0]}")
        return results

    def _run(self, world: int, case: Callable, *args: Any) -> tuple[list[str], list[Any]]:
        self._cases += 1
        if self._cases % CASES_BEFORE_RENEWAL == 0:
            self.close()
        while len(self._workers) < world:
            self._start()
        with tempfile.TemporaryDirectory() as folder:
            for _, connection in self._workers[:world]:
                connection.send((case, world, os.path.join(folder, "store"), args))
            states, results = [], []
            for rank, (_, connection) in enumerate(self._workers[:world]):
                if not connection.poll(CASE_TIMEOUT_S):
                    self.close()
                    raise WorkerFailure(f"rank {rank} of {world} did not answer in {CASE_TIMEOUT_S} s: {results}")
                try:
                    state, result = connection.recv()
                except EOFError:
                    self.close()
                    raise WorkerFailure(f"rank {rank} of {world} died: {results}") from None
                states.append(state)
                results.append(result)
        return states, results

    def close(self) -> None:
        for _, connection in self._workers:
            connection.close()  # an idle worker leaves, and ends what it started
        for process, _ in self._workers:
            process.join(5)
            process.kill()
            process.join()
        self._workers.clear()

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, len(self._workers)))
        process.start()
        theirs.close()
        self._workers.append((process, ours))
