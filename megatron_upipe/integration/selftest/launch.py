"""Starting the selftest: on torchrun's ranks, or on CPU ranks of its own."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

from megatron_upipe.errors import UPipeError
from megatron_upipe.integration.selftest.shapes import MODELS, trials

DESCRIPTION = """\
Compares UPipe with Megatron's own attention on this machine: all layouts of the given heads that fit the ranks, in fp64
and bf16, with weights that arrive in hooks; then measures exchange and ring bandwidth. Exit status 1 on any failure.

  megatron-upipe selftest --cpu-ranks 4 --model llama3-8b              # alone, on CPUs
  torchrun --nproc-per-node 8 -m megatron_upipe.cli selftest           # on GPUs, or on CPUs if there are none
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=sorted(MODELS), default="llama3-8b", help="head counts of a model")
    parser.add_argument("--heads", type=int, help="query heads, instead of the model's")
    parser.add_argument("--kv-heads", type=int, help="KV heads, instead of the model's")
    parser.add_argument("--head-dim", type=int, help="head size, instead of the model's")
    parser.add_argument("--cpu-ranks", type=int, metavar="N", help="start N CPU ranks here; not under torchrun")
    parser.add_argument("--mebibytes", type=int, default=8, help="tensor size of the bandwidth measurement (default 8)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace, argv: list[str]) -> int:
    """Exit status; ``argv`` is the command line that ``args`` came from. Raises UPipeError for impossible requests."""
    given = (args.heads, args.kv_heads, args.head_dim)
    heads, kv_heads, head_dim = (m if g is None else g for g, m in zip(given, MODELS[args.model], strict=True))
    for flag, value in (
        ("heads", heads),
        ("kv-heads", kv_heads),
        ("head-dim", head_dim),
        ("mebibytes", args.mebibytes),
    ):
        if value < 1 or (flag == "head-dim" and value % 2):
            raise UPipeError(f"--{flag} {value} is not possible; give a positive number, for --head-dim an even one")
    under_torchrun = "LOCAL_RANK" in os.environ
    if args.cpu_ranks is None and not under_torchrun:
        raise UPipeError("selftest needs ranks: run it under torchrun, or pass --cpu-ranks 4")
    if args.cpu_ranks is not None and not under_torchrun:
        trials(heads, kv_heads, args.cpu_ranks)  # refuse before anything starts
        return _start_cpu_ranks(args.cpu_ranks, argv)
    return _run_rank(args, heads, kv_heads, head_dim)


def _start_cpu_ranks(ranks: int, argv: list[str]) -> int:
    """The same command line under torchrun on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([*command, "-m", "megatron_upipe.cli", *argv], env=environment, check=False)
    return 0 if done.returncode == 0 else 1


def _run_rank(args: argparse.Namespace, heads: int, kv_heads: int, head_dim: int) -> int:
    import torch
    import torch.distributed as dist

    from megatron_upipe.integration import cpu
    from megatron_upipe.integration.versions import check_megatron_version

    check_megatron_version()
    on_cpu = args.cpu_ranks is not None or not torch.cuda.is_available()
    if on_cpu:
        cpu.install(quiet=args.json)
    from megatron_upipe.integration.selftest import report

    report.initialize_world("cpu" if on_cpu else "cuda")
    plan = trials(heads, kv_heads, dist.get_world_size())
    result = report.run(plan, heads, kv_heads, head_dim, args.mebibytes, progress=sys.stderr.isatty())
    if dist.get_rank() == 0:
        print(json.dumps(result.json()) if args.json else result.table(), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if result.good else 1
