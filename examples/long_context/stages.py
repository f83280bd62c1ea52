#!/usr/bin/env python3
"""Continued pre-training for a longer context, in stages: each is longer, has its RoPE base, and begins from the last.

    python examples/long_context/stages.py --original 8K --base 500000 --head-dim 128 --lengths 64K 256K 1M \\
        --load CHECKPOINT --save RUNS -- torchrun --nproc-per-node 8 -m megatron_upipe.run <all flags of a stage>

runs the command after -- once for each length, with --seq-length, --max-position-embeddings, --rotary-base, --load and
--save added; --print only shows the commands. A stage is complete when its checkpoint has the command's --train-iters,
and is then passed over; one that was interrupted goes on from its own checkpoint. The command has to wait until the
training ends.

The base grows with the length L as base * (L / original)^(d / (d - 2)), so that the slowest angle turns as far over L
as it did over the original length (NTK-aware scaling, bloc97 2023); --bases sets others.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

UNITS = {"": 1, "K": 2**10, "M": 2**20}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--original", type=tokens, required=True, help="context that the checkpoint was trained for")
    parser.add_argument("--base", type=int, required=True, help="its --rotary-base")
    parser.add_argument("--head-dim", type=int, required=True, help="its --kv-channels")
    parser.add_argument("--lengths", type=tokens, nargs="+", required=True, help="of the stages: 64K 256K 1M")
    parser.add_argument("--bases", type=int, nargs="+", help="of the stages, instead of the rule")
    parser.add_argument("--load", type=Path, required=True, help="checkpoint to begin from")
    parser.add_argument("--save", type=Path, required=True, help="folder; each stage has one in it")
    parser.add_argument("--print", action="store_true", help="only show the commands")
    parser.add_argument("command", nargs="+", metavar="-- COMMAND", help="that trains a stage")
    given = parser.parse_args()
    if sorted(set(given.lengths)) != given.lengths or given.lengths[0] < given.original:
        parser.error(f"--lengths have to grow from --original {given.original} on")
    if given.bases and len(given.bases) != len(given.lengths):
        parser.error(f"--bases has {len(given.bases)} values for {len(given.lengths)} --lengths")
    if given.head_dim < 4:
        parser.error(f"--head-dim {given.head_dim} is too small; the least is 4")
    if iterations(given.command) is None:
        parser.error("the command has no --train-iters, by which a complete stage is known; add it")
    if not given.print and reached(given.load) is None:
        parser.error(f"--load {given.load} is no checkpoint: it has no latest_checkpointed_iteration.txt")
    before = given.load
    for index, length in enumerate(given.lengths):
        base = given.bases[index] if given.bases else scaled_base(given.base, length / given.original, given.head_dim)
        folder = given.save / f"{length}-tokens"
        if not run(given, index, length, base, before, folder):
            return 1
        before = folder
    return 0


def run(given: argparse.Namespace, index: int, length: int, base: int, before: Path, folder: Path) -> bool:
    """Whether the stage is complete. One that was interrupted goes on from its own checkpoint."""
    print(f"== stage {index + 1} of {len(given.lengths)}: {length} tokens, --rotary-base {base}", flush=True)
    wanted = iterations(given.command)
    begun = reached(folder) is not None
    command = [*given.command, "--seq-length", str(length), "--max-position-embeddings", str(length)]
    command += ["--rotary-base", str(base), "--save", str(folder)]
    first = ["--load", str(before), "--finetune", "--exit-on-missing-checkpoint"]
    command += ["--load", str(folder)] if begun else first
    if given.print:
        print(shlex.join(command))
        return True
    if reached(folder) == wanted:
        print(f"   complete: {folder}")
        return True
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    if subprocess.run(command, check=False).returncode != 0:
        print(f"stages.py: stage {index + 1} failed; the same command goes on from {folder}", file=sys.stderr)
        return False
    if reached(folder) != wanted:
        where = f"stage {index + 1} ended at iteration {reached(folder) or 0} of {wanted}"
        print(f"stages.py: {where}; the same command goes on", file=sys.stderr)
        return False
    print(f"   {time.monotonic() - started:.0f} s", flush=True)
    return True


def iterations(command: list[str]) -> str | None:
    """Its ``--train-iters``, the last one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--train-iters")
    return parser.parse_known_args(command)[0].train_iters


def reached(folder: Path) -> str | None:
    """The iteration of the folder's last checkpoint."""
    latest = folder / "latest_checkpointed_iteration.txt"
    return latest.read_text().strip() if latest.exists() else None


def scaled_base(base: int, longer: float, head_dim: int) -> int:
    return round(base * longer ** (head_dim / (head_dim - 2)))


def tokens(given: str) -> int:
    found = re.fullmatch(r"(\d+)([KM]?)", given.upper())
    if found is None:
        raise argparse.ArgumentTypeError(f"{given} is no number of tokens; write 131072, 128K or 1M")
    return int(found[1]) * UNITS[found[2]]


if __name__ == "__main__":
    sys.exit(main())
