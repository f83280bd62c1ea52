"""Cost against the length of the sequence and the number of ranks, with fitted exponents.

    python benchmarks/scaling.py --tokens 2048 4096 8192 16384 --ranks 1 2
    python benchmarks/scaling.py --tokens 2048 8192 32768 65536 --ranks 2 --methods upipe --plot scaling.png

Runs ``methods.py`` once for each number of ranks, on this machine. Time should grow with the square of the length where
attention dominates, peak and bytes sent in proportion to it; an exponent is the slope of a line through the logarithms.
On CPUs the ranks share the cores: their number then says nothing about speed, only about peak and bytes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy

from megatron_upipe.planning.plots import check_folder

QUANTITIES = ("seconds", "peak_bytes", "sent_bytes")
HERE = Path(__file__).parent


def measure(args: argparse.Namespace, ranks: int) -> dict[str, dict[str, list[float]]]:
    """Of each method, the quantities at all lengths."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(HERE / "methods.py"), "--json", "--pairs", str(args.pairs), "--warm-up", "1"]
    command += ["--error-tokens", "64", "--baseline", args.methods[0]]
    command += ["--methods", *args.methods, "--tokens", *map(str, args.tokens)]
    print(f"{ranks} ranks ...", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, dict[str, list[float]]] = {}
    for length in json.loads(done.stdout)["lengths"]:
        for name, row in length["methods"].items():
            values = {**row, "sent_bytes": sum(row["sent_bytes"].values())}
            for quantity in QUANTITIES:
                found.setdefault(name, {}).setdefault(quantity, []).append(values[quantity])
    return found


def exponent(sizes: list[int], values: list[float]) -> float | None:
    """Slope of log(value) over log(size); None where there is nothing to fit."""
    if len(sizes) < 2 or min(values) <= 0:
        return None
    return float(numpy.polyfit(numpy.log(sizes), numpy.log(values), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--methods", nargs="+", default=["ulysses", "upipe", "upipe+overlap"])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", metavar="FILE", help="draw seconds over the length")
    args = parser.parse_args()
    check_folder("--plot", args.plot)
    measured = {ranks: measure(args, ranks) for ranks in args.ranks}
    result: dict[str, Any] = {"tokens": args.tokens, "measured": measured, "over_tokens": {}, "over_ranks": {}}
    for ranks, methods in measured.items():
        result["over_tokens"][ranks] = {
            name: {q: exponent(args.tokens, row[q]) for q in QUANTITIES} for name, row in methods.items()
        }
    everywhere = set.intersection(*(set(methods) for methods in measured.values()))
    for name in (name for name in args.methods if name in everywhere):
        result["over_ranks"][name] = {
            q: exponent(args.ranks, [measured[ranks][name][q][-1] for ranks in args.ranks]) for q in QUANTITIES
        }
    print(json.dumps(result) if args.json else text(args, result))
    if args.plot:
        draw(args, measured)


def text(args: argparse.Namespace, result: dict[str, Any]) -> str:
    lines = [f"exponents over {', '.join(map(str, args.tokens))} tokens", ""]
    lines += ["| ranks | method | seconds | peak | bytes sent |", "|---|---|---|---|---|"]
    for ranks, methods in result["over_tokens"].items():
        lines += [f"| {ranks} | {name} | {_shown(row)} |" for name, row in methods.items()]
    if len(args.ranks) < 2:
        return "\n".join(lines)
    lines += ["", f"over {', '.join(map(str, args.ranks))} ranks, at {args.tokens[-1]} tokens", ""]
    lines += ["| method | seconds | peak | bytes sent |", "|---|---|---|---|"]
    lines += [f"| {name} | {_shown(row)} |" for name, row in result["over_ranks"].items()]
    return "\n".join(lines)


def _shown(row: dict[str, float | None]) -> str:
    return " | ".join("" if row[q] is None else f"{row[q]:.2f}" for q in QUANTITIES)


def draw(args: argparse.Namespace, measured: dict) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for ranks, methods in measured.items():
        for name, row in methods.items():
            axes.loglog(args.tokens, row["seconds"], marker="o", base=2, label=f"{name}, {ranks} ranks")
    axes.set_xlabel("tokens")
    axes.set_ylabel("seconds, forward and backward of an attention block")
    axes.legend()
    figure.savefig(args.plot, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
