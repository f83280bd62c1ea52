"""Ring, Ulysses, USP, UPipe and other packages side by side: time, memory, bytes, collectives, error.

    torchrun --nproc-per-node 2 benchmarks/methods.py --tokens 4096 16384
    torchrun --nproc-per-node 2 benchmarks/methods.py --scope layer --tokens 32768 --hidden 128 --head-dim 16

Everything runs forward and backward with the same x and weights in one process group (gloo on CPUs, NCCL on GPUs), in
pairs with the baseline, one after the other; the ratio is the median over the pairs, its interval a bootstrap's. Peak,
bytes and collectives are those of rank 0, counted from its tensors, weights left out. Peers that are not installed are
left out; `DS_BUILD_OPS=0 pip install -r benchmarks/requirements-peers.txt` into an environment of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

import candidates
import peers
import torch
import torch.distributed as dist
from side_by_side import errors, pairs_of, ratio, stage_times, traffic

from megatron_upipe.errors import UPipeError
from megatron_upipe.integration import cpu
from megatron_upipe.planning.plots import check_folder

BLOCKS = [
    *("ring", "ulysses", "ulysses+recompute", "usp", "upipe", "upipe+overlap", "upipe-2p", "upipe-2p+overlap"),
    *peers.NAMES,
    *(f"{name}+recompute" for name in ("deepspeed", "yunchang-ulysses")),
]

PROFILED_STEPS = 15


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scope", choices=("block", "layer"), default="block", help="attention block or whole layer")
    parser.add_argument("--methods", nargs="+", help="by default all that run; NAME+overlap, NAME+recompute")
    parser.add_argument("--baseline", help="default ulysses, of layers ulysses+recompute")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384], help="of the whole sequence")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=2, metavar="PAIRS")
    parser.add_argument("--error-tokens", type=int, default=512, help="length at which errors are measured")
    parser.add_argument("--profile", action="store_true", help="also where the time of stages goes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", metavar="FILE", help="draw the ratios over the length")
    args = parser.parse_args()
    try:
        check_folder("--plot", args.plot)
    except UPipeError as error:
        parser.error(str(error))
    if args.pairs < 1:
        parser.error(f"--pairs {args.pairs} is too few; the least is 1")
    unknown = set(args.methods or []) - set(candidates.LAYERS)
    if args.scope == "layer" and unknown:
        parser.error(f"--methods {min(unknown)}: there are layers {', '.join(candidates.LAYERS)}")
    return args


def main() -> None:
    args = parse()
    with contextlib.redirect_stdout(sys.stderr):  # where layers say what they do
        result = measure(args)
    if dist.get_rank() == 0:
        print(json.dumps(result) if args.json else text(result))
        if args.plot:
            draw(result, Path(args.plot))
    dist.destroy_process_group()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    if not on_gpu and args.scope == "layer":  # Megatron's own code needs it; peers do without
        cpu.install(quiet=True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    check_lengths(args)
    sizes = candidates.Sizes(args.heads, args.kv_heads, args.head_dim, args.hidden, getattr(torch, args.dtype), device)
    if args.scope == "layer":
        found = candidates.layer_candidates(sizes, args.methods or list(candidates.LAYERS))
    else:
        found = candidates.block_candidates(sizes, args.methods or BLOCKS)
    baseline = args.baseline or ("ulysses+recompute" if args.scope == "layer" else candidates.ULYSSES)
    by_name = {candidate.name: candidate for candidate in found}
    if baseline not in by_name:
        raise SystemExit(f"--baseline {baseline} is not among the methods {', '.join(by_name)}")
    result: dict[str, Any] = {
        "scope": args.scope,
        "baseline": baseline,
        "world": dist.get_world_size(),
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU, gloo, {os.cpu_count()} cores",
        "pairs": args.pairs,
        "notes": {one.name: one.note for one in found if one.note},
        "lengths": [],
    }
    if args.scope == "block":
        result["errors"] = {name: errors(one, sizes, args.error_tokens) for name, one in by_name.items()}
    for tokens in args.tokens:
        torch.manual_seed(2)
        x = torch.randn(tokens, 1, args.hidden, dtype=sizes.dtype, device=device)
        share = sizes.attention_share(tokens, candidates.FFN if args.scope == "layer" else 0.0)
        rows = {}
        for name, one in by_name.items():
            say(f"{tokens} tokens: {name}")
            pairs = pairs_of(by_name[baseline], one, x, args.pairs, args.warm_up)
            middle, low, high = ratio(pairs)
            rows[name] = {"ratio": middle, "low": low, "high": high, **traffic(one, x)}
            rows[name]["baseline_seconds"], rows[name]["seconds"] = (median(of) for of in zip(*pairs, strict=True))
            if args.profile:
                rows[name]["baseline_ms"], rows[name]["stage_ms"] = stage_times(
                    by_name[baseline], one, x, PROFILED_STEPS
                )
        result["lengths"].append({"tokens": tokens, "attention_share_of_flops": share, "methods": rows})
    return result


def check_lengths(args: argparse.Namespace) -> None:
    """Every rank holds two chunks of one size. Ends the process with one sentence."""
    unit = 2 * dist.get_world_size()
    for flag, lengths in (("--tokens", args.tokens), ("--error-tokens", [args.error_tokens])):
        for tokens in lengths:
            if tokens < unit or tokens % unit:
                nearest = max(1, round(tokens / unit)) * unit
                raise SystemExit(
                    f"{flag} {tokens} is not a multiple of 2 x {unit // 2} ranks; the nearest is {nearest}"
                )


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, file=sys.stderr, flush=True)


def text(result: dict[str, Any]) -> str:
    lines = [f"{result['scope']}, {result['world']} ranks, {result['device']}, {result['pairs']} pairs"]
    baseline = result["baseline"]
    for length in result["lengths"]:
        lines += [
            "",
            f"{length['tokens']} tokens, attention {length['attention_share_of_flops']:.0%} of the FLOPs",
            "",
            f"| method | time / {baseline} (95 %) | seconds | {baseline} in these pairs | peak MiB | sent MiB "
            "| collectives | error |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for name, row in length["methods"].items():
            sent = ", ".join(f"{kind} {size / 2**20:.2f}" for kind, size in row["sent_bytes"].items())
            calls = ", ".join(f"{kind} {count}" for kind, count in row["collectives"].items())
            error = max(result["errors"][name].values()) if "errors" in result else None
            lines.append(
                f"| {name} | {row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f}) "
                f"| {row['seconds']:.3f} | {row['baseline_seconds']:.3f} "
                f"| {row['peak_bytes'] / 2**20:.1f} | {sent} | {calls} | {'' if error is None else f'{error:.1e}'} |"
            )
        for name, row in length["methods"].items():
            if len(row.get("stage_ms", [])) > 1:
                lines += ["", f"| ms of a step | {name} | {baseline} by turns |", "|---|---|---|"]
                for part, ms in row["stage_ms"].items():
                    theirs = row["baseline_ms"].get(part)
                    lines.append(
                        f"| {part.removeprefix('upipe ')} | {ms:.1f} | {'' if theirs is None else f'{theirs:.1f}'} |"
                    )
    notes = result["notes"].items()
    lines += ["", *(f"{name}: {note}" for name, note in notes)] if notes else []
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5))
    tokens = [length["tokens"] for length in result["lengths"]]
    for name in result["lengths"][0]["methods"]:
        rows = [length["methods"][name] for length in result["lengths"]]
        middles = [row["ratio"] for row in rows]
        around = [[row["ratio"] - row["low"] for row in rows], [row["high"] - row["ratio"] for row in rows]]
        axes.errorbar(tokens, middles, yerr=around, label=name, marker="o", capsize=3)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens")
    axes.set_ylabel(f"time / {result['baseline']}")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
