"""``--upipe-overlap auto``: on where the simulated peak of this very command line fits with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace

import torch
import torch.distributed as dist

from megatron_upipe.integration import cpu

_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LONGEST_S = 300  # for a simulation, which takes some seconds; no more than half of what the other ranks wait


def resolve_overlap(args: Namespace) -> str:
    """``on`` or ``off`` for the flag as given; None is ``auto``. Where that asks, collective over the world.

    On the CPU stand-in ``auto`` is on: there is no memory of a device to run out of.
    """
    given = args.upipe_overlap or "auto"
    if given != "auto":
        return given
    if args.context_parallel_size == 1 or _one_stage(args):
        return "off"  # there is nothing beside which to exchange
    if cpu.is_installed():
        return "on"
    found = [_by_simulation(args) if dist.get_rank() == 0 else None]  # whatever happens there, the others wait
    dist.broadcast_object_list(found, src=0)
    answer, why = found[0]
    if dist.get_rank() == 0:
        print(f"megatron_upipe: --upipe-overlap auto is {answer}: {why}", flush=True)
    return answer


def _one_stage(args: Namespace) -> bool:
    p, _ = args.hierarchical_context_parallel_sizes or (args.context_parallel_size, 1)
    return (args.upipe_heads_per_stage or p) == args.num_attention_heads // args.tensor_model_parallel_size


def _by_simulation(args: Namespace) -> tuple[str, str]:
    try:
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2**30
        of_node = int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count()))
        longest = min(LONGEST_S, 30 * args.distributed_timeout_minutes)
        return overlap_fits(sys.argv[1:], args.world_size, of_node, memory, args.padded_vocab_size, longest)
    except Exception as error:
        return "off", f"this command line is not simulated ({type(error).__name__}: {error})"


def overlap_fits(
    words: list[str],
    gpus: int,
    gpus_per_node: int,
    memory_gib: float,
    vocabulary: int | None,
    longest_s: float = LONGEST_S,
) -> tuple[str, str]:
    """``on`` or ``off`` for a training command line's flags, and why. In a process of its own: a simulation takes the
    place of Megatron's process groups."""
    words = [*words, "--upipe-overlap", "on"]  # the last one counts
    machine = ["--gpus", str(gpus), "--gpus-per-node", str(gpus_per_node), "--gpu-memory", f"{memory_gib:.2f}"]
    sizes = [] if vocabulary is None else ["--vocab-size", str(vocabulary)]
    command = [sys.executable, "-m", "megatron_upipe.cli", "fit", *machine, *sizes, "--json", "--", *words]
    # it needs neither a GPU nor these ranks
    outside = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    outside["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # the same Megatron, which may be the script's
    try:
        done = subprocess.run(
            command,
            env={**outside, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=longest_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "off", f"this command line is not simulated ({error})"
    try:
        peak = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return "off", f"this command line is not simulated ({lines[-1]})"
    needed = f"simulated peak {peak['device_peak_gib']:.1f} GiB of {peak['usable_gib']:.1f}"
    if peak["device_peak_gib"] <= peak["usable_gib"]:
        return "on", needed
    return "off", needed
