"""``--upipe-overlap auto``: on where the simulated peak of this very command line fits with it."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace

import torch
import torch.distributed as dist

from megatron_upipe.integration import cpu

LONGEST_S = 300  # for a simulation, which takes some seconds


def resolve_overlap(args: Namespace) -> str:
    """``on`` or ``off`` for the flag as given; None is ``auto``. Where that asks, collective over the world.

    On the CPU stand-in ``auto`` is on: there is no memory of a device to run out of.
    """
    given = args.upipe_overlap or "auto"
    if given != "auto":
        return given
    if args.context_parallel_size == 1 or not dist.is_initialized():
        return "off"
    if cpu.is_installed():
        return "on"
    found = [_by_simulation(args) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    answer, why = found[0]
    if dist.get_rank() == 0:
        print(f"megatron_upipe: --upipe-overlap auto is {answer}: {why}", flush=True)
    return answer


def _by_simulation(args: Namespace) -> tuple[str, str]:
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2**30
    return overlap_fits(sys.argv[1:], args.world_size, torch.cuda.device_count(), memory, args.padded_vocab_size)


def overlap_fits(
    words: list[str], gpus: int, gpus_per_node: int, memory_gib: float, vocabulary: int | None
) -> tuple[str, str]:
    """``on`` or ``off`` for a training command line's flags, and why. In a process of its own: a simulation takes the
    place of Megatron's process groups."""
    words = [*words, "--upipe-overlap", "on"]  # the last one counts
    machine = ["--gpus", str(gpus), "--gpus-per-node", str(gpus_per_node), "--gpu-memory", f"{memory_gib:.2f}"]
    sizes = [] if vocabulary is None else ["--vocab-size", str(vocabulary)]
    command = [sys.executable, "-m", "megatron_upipe.cli", "fit", *machine, *sizes, "--json", "--", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
        peak = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        lines = [] if "done" not in locals() else done.stderr.strip().splitlines()
        return "off", f"this command line is not simulated ({lines[-1] if lines else 'it took too long'})"
    needed = f"simulated peak {peak['device_peak_gib']:.1f} GiB of {peak['usable_gib']:.1f}"
    if peak["device_peak_gib"] <= peak["usable_gib"]:
        return "on", needed
    return "off", needed
