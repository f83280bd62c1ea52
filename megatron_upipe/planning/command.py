"""``megatron-upipe simulate``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from megatron_upipe.planning import arguments
from megatron_upipe.planning.plots import check_folder, draw_timeline
from megatron_upipe.planning.quiet import quiet
from megatron_upipe.planning.scenario import METHODS, tokens_text
from megatron_upipe.planning.states import GIB

DESCRIPTION = """\
Runs a training step of the real model code on tensors without data, as one of the given number of GPUs would, and says
what is alive at the peak, what waits on the host and what is sent. Nothing is computed, no GPU is used; some seconds on
a CPU. Long steps are extrapolated from two short ones, which the tests find exact; --timeline runs all of it.

  megatron-upipe simulate --model llama3-8b --gpus 8 --tokens 5M --keep-attention 12
  megatron-upipe simulate --model llama3-8b --gpus 16 --ulysses 8 --ring 2 --tokens 8M --json
  megatron-upipe simulate --model llama3-8b --gpus 8 --tokens 1M --method ulysses upipe --timeline step.png

methods: ring, all ranks in a ring; ulysses and usp, all heads in one stage; upipe, --heads-per-stage at a time
(default P). All run under the same policy: --keep-attention, --offload and tiles are UPipe's own. authors: the paper's
own code, by a list of the tensors that it holds. Exit status 1: a method does not fit.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_arguments(parser, searched=False)
    parser.add_argument("--tokens", required=True, help="sequence length: 8M is 8 * 2^20, 128K, or a number")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages, with as many micro-batches (default 1)")
    parser.add_argument(
        "--method", nargs="+", choices=METHODS, default=["upipe"], help="one or several (default upipe)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--timeline", metavar="PNG", help="run all tiles and draw live bytes over the simulated layers' step"
    )


def main(args: argparse.Namespace) -> int:
    """Exit status 0; 1 when a method does not fit on the card. Raises UPipeError for impossible requests."""
    from megatron_upipe.planning.report import most_kept, report

    usable, host = arguments.device_bytes(args), arguments.host_bytes_of(args)
    check_folder("--timeline", args.timeline)
    scenarios = []
    for method in dict.fromkeys(args.method):
        scenario, _ = arguments.scenario_of(
            args, method=method, tokens=arguments.tokens_of(args), pipeline_parallel=args.pp
        )
        scenario.check()
        scenarios.append(scenario)
    reports = []
    for scenario in scenarios:
        started = time.monotonic()
        print(f"simulating {scenario.method} at {tokens_text(scenario.tokens)} ...", file=sys.stderr, flush=True)
        with quiet():
            reports.append(report(scenario, whole=args.timeline is not None))
            _ = reports[-1].work  # simulates more, where it is wanted
        print(f"  {time.monotonic() - started:.0f} s", file=sys.stderr)
    fits = {r.scenario.method: r.fits(usable, host) for r in reports}
    for r in reports:
        if not fits[r.scenario.method] and r.host > host:
            kept = most_kept(r.scenario, host)
            advice = "--checkpoint-every" if kept is None else f"--keep-attention {kept}"
            print(f"{r.scenario.method}: the host memory of a node would do with {advice}", file=sys.stderr)
    if args.json:
        methods = {r.scenario.method: {**r.as_json(), "fits": fits[r.scenario.method]} for r in reports}
        head = dict(model=args.model, gpus=args.gpus, tokens=scenarios[0].tokens, simulated=True)
        print(json.dumps({**head, "usable_gib": usable / GIB, "methods": methods}, indent=1))
    else:
        room = f"{args.gpu_memory:g} GiB less {args.reserve:g} of reserve, and {args.host_memory:g} GiB of a node"
        for r in reports:
            print(f"{r.text()}\n  {'fits' if fits[r.scenario.method] else 'DOES NOT FIT'} in {room}\n")
    if args.timeline:
        draw_timeline(reports, Path(args.timeline))
    return 0 if all(fits.values()) else 1
