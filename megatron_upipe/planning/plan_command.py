"""``megatron-upipe plan``."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_upipe.planning import arguments
from megatron_upipe.planning.plots import check_folder, draw_lengths
from megatron_upipe.planning.quiet import quiet
from megatron_upipe.planning.scenario import tokens_text
from megatron_upipe.planning.speed import Machine
from megatron_upipe.planning.states import gib
from megatron_upipe.planning.training_flags import simulate_flags, training_flags

if TYPE_CHECKING:
    from megatron_upipe.planning.plan import Choice, Limits
    from megatron_upipe.planning.scenario import Scenario

DESCRIPTION = """\
Finds the longest context that fits, or for --tokens the fastest configuration that does, and prints the flags to train
with. Memory is simulated as by `megatron-upipe simulate`; speed is a simple model (docs/planning.md), whose constants
are those of H100 nodes. Half a minute to some minutes on a CPU.

  megatron-upipe plan --model llama3-8b --gpus 8
  megatron-upipe plan --model qwen3-32b --gpus 16 --tokens 1M --json
  megatron-upipe plan --model my/config.json --gpus 32 --tokens 4M --offload host --plot lengths.png
"""
POINTS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_arguments(parser, searched=True)
    parser.add_argument("--tokens", help="find the fastest for this length instead of the longest: 8M is 8 * 2^20")
    parser.add_argument(
        "--constants",
        metavar="JSON",
        help="file with other constants of the speed model: " + ", ".join(asdict(Machine())),
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--plot", metavar="PNG", help="draw peak memory over context length for ring, Ulysses and UPipe"
    )


def main(args: argparse.Namespace) -> int:
    """Exit status 0. Raises UPipeError where nothing fits, or for impossible requests."""
    from megatron_upipe.planning.plan import Limits, Search

    limits = Limits(arguments.device_bytes(args), arguments.host_bytes_of(args))
    check_folder("--plot", args.plot)
    wanted = arguments.tokens_of(args) if args.tokens else None
    base, fixed = arguments.scenario_of(args, tokens=wanted or 2**20)
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:4.0f} s] {text}", file=sys.stderr, flush=True)

    search = Search(base, fixed, limits, Machine.read(args.constants), say)
    with quiet():
        longest = None if wanted else search.longest()
        choice = search.fastest(longest.tokens, longest) if longest else search.fastest(wanted)
        lines = _lines(choice.report.scenario, limits, say) if args.plot else {}
    print(json.dumps(_as_json(args, choice, limits), indent=1) if args.json else _text(args, choice, limits))
    if args.plot:
        s = choice.report.scenario
        title = f"{s.model.name} on {s.gpus} GPUs, same layers, states and host store for all methods"
        draw_lengths(lines, limits.device, title, Path(args.plot))
    return 0


def _text(args: argparse.Namespace, choice: Choice, limits: Limits) -> str:
    s, when = choice.report.scenario, choice.time
    what = "fastest that fits" if args.tokens else "longest context that fits"
    parts = ", ".join(f"{name} {seconds:,.3g}" for name, seconds in sorted(when.parts.items(), key=lambda p: -p[1]))
    flags = shlex.join(training_flags(s)).replace(" --", " \\\n  --")
    device, host = (gib(margin) for margin in _margins(choice, limits))
    return (
        f"{what}: {tokens_text(s.tokens)} tokens; {s.sharding}, {s.layers_kept} of {s.model.layers} layers keep "
        f"attention, offload {s.offload}, prefetch {s.prefetch}, every {s.checkpoint_every} input, "
        f"overlap {s.overlap}\n"
        f"{choice.report.text()}\n"
        f"  left: {device:.1f} GiB of a card beside the {args.reserve:g} of reserve, {host:.0f} GiB of a node\n"
        f"  a step takes about {when.step:,.1f} s, {when.tokens_per_gpu:,.1f} tokens a second and GPU (a model, not a "
        f"measurement); seconds: {parts}\n\n"
        f"train with (model, data and schedule are yours):\n  {flags}\n\n"
        f"see what is alive:\n  megatron-upipe simulate {shlex.join(simulate_flags(s, args.model))}"
    )


def _as_json(args: argparse.Namespace, choice: Choice, limits: Limits) -> dict[str, Any]:
    s, when = choice.report.scenario, choice.time
    p, r = s.sizes
    device, host = _margins(choice, limits)
    return {
        "model": args.model,
        "gpus": s.gpus,
        "tokens": s.tokens,
        "longest": not args.tokens,
        "simulated": True,
        "configuration": dict(
            ulysses=p,
            ring=r,
            tensor_parallel=s.tensor_parallel,
            heads_per_stage=s.schedule.heads_per_stage,
            keep_attention=s.layers_kept,
            offload=s.offload,
            prefetch=s.prefetch,
            overlap=s.overlap,
            checkpoint_every=s.checkpoint_every,
            mlp_tile_tokens=s.mlp_tile_tokens,
            loss_tile_tokens=s.loss_tile_tokens,
            sharding=s.sharding,
            optimizer="host" if s.optimizer_on_host else "gpu",
        ),
        "margin_gib": {"device": gib(device), "host_per_node": gib(host)},
        "step_seconds": round(when.step, 3),
        "tokens_per_second_and_gpu": round(when.tokens_per_gpu, 3),
        "seconds": {name: round(seconds, 4) for name, seconds in when.parts.items()},
        "flags": training_flags(s),
        **choice.report.as_json(),
    }


def _margins(choice: Choice, limits: Limits) -> tuple[float, float]:
    return limits.device - choice.report.device_peak, limits.host - choice.report.host


def _lines(chosen: Scenario, limits: Limits, say: Any) -> dict[str, list[tuple[int, float]]]:
    """Peaks at rising lengths, up to somewhat more than the chosen one or what the card holds."""
    from megatron_upipe.planning.report import report

    p, r = chosen.sizes
    ranks = chosen.context_parallel
    methods = {"ring": dict(method="ring", ulysses=None, ring=1)}
    methods |= {"ulysses" if r == 1 else f"usp, {p} x {r}": dict(method="ulysses" if r == 1 else "usp")}
    methods |= {f"upipe, {p} x {r}": dict(method="upipe")}
    unit = 2 * ranks * chosen.tensor_parallel
    lengths = [max(1, chosen.tokens * i * 3 // (2 * POINTS * unit)) * unit for i in range(1, POINTS + 1)]
    lines = {}
    for name, changes in methods.items():
        say(f"plot: {name}")
        line = lines[name] = []
        for tokens in lengths:
            line.append((tokens, report(replace(chosen, tokens=tokens, **changes)).device_peak))
            if line[-1][1] > 2 * limits.device:
                break
    return lines
