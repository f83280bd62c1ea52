"""``megatron-upipe simulate``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from megatron_upipe.errors import UPipeError
from megatron_upipe.planning.models import PRESETS, find_model
from megatron_upipe.planning.scenario import METHODS, Scenario, parse_tokens, tokens_text
from megatron_upipe.planning.states import SHARDINGS

DESCRIPTION = """\
Runs a training step of the real model code on tensors without data, as one of the given number of GPUs would, and says
what is alive at the peak, what waits on the host and what is sent. Nothing is computed, no GPU is used; seconds to a
minute on two cores.

  megatron-upipe simulate --model llama3-8b --gpus 8 --tokens 5M
  megatron-upipe simulate --model llama3-8b --gpus 16 --ulysses 8 --ring 2 --tokens 8M --json
  megatron-upipe simulate --model llama3-8b --gpus 8 --tokens 1M --method ulysses upipe --timeline step.png

methods: ring, all ranks in a ring; ulysses and usp, all heads in one stage; upipe, --heads-per-stage at a time
(default P). All run under the same policy: --keep-attention, --offload and tiles are UPipe's own. authors: the paper's
own code, by a list of the tensors that it holds.
"""
RESERVE_GIB = 6.0  # CUDA context, NCCL, fragmentation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help=f"{', '.join(PRESETS)}, or a Hugging Face config.json")
    parser.add_argument("--gpus", type=int, required=True, help="of the whole run")
    parser.add_argument("--tokens", required=True, help="sequence length: 8M is 8 * 2^20, 128K, or a number")
    parser.add_argument(
        "--method", nargs="+", choices=METHODS, default=["upipe"], help="one or several (default upipe)"
    )
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size, with sequence parallelism")
    parser.add_argument("--ulysses", type=int, metavar="P", help="default: what --ring leaves")
    parser.add_argument("--ring", type=int, default=1, metavar="R")
    parser.add_argument("--heads-per-stage", type=int, metavar="U", help="of upipe; default P, the least memory")
    parser.add_argument("--keep-attention", type=int, metavar="N", help="layers that keep their attention; default all")
    parser.add_argument("--offload", choices=("none", "host"), default="host", help="default host")
    parser.add_argument("--prefetch", choices=("on", "off"), default="off", help="with --offload host (default off)")
    parser.add_argument("--checkpoint-every", type=int, default=1, metavar="K")
    parser.add_argument("--mlp-tile-tokens", type=int, default=4096, metavar="N")
    parser.add_argument("--loss-tile-tokens", type=int, default=1024, metavar="N")
    parser.add_argument("--kernel", default="flash-attn-3", help="attention backend whose workspace is counted")
    parser.add_argument("--sharding", choices=SHARDINGS, default="megatron-fsdp", help="default megatron-fsdp")
    parser.add_argument("--optimizer", choices=("gpu", "host"), default="gpu", help="where its states are")
    parser.add_argument("--gpu-memory", type=float, default=80.0, metavar="GIB", help="of a card (default 80)")
    parser.add_argument("--host-memory", type=float, default=1770.0, metavar="GIB", help="of a node (1770, 1.9 TB)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--timeline", metavar="PNG", help="draw live bytes over the simulated layers' step")


def main(args: argparse.Namespace) -> int:
    """Exit status 0; 1 when a method does not fit on the card. Raises UPipeError for impossible requests."""
    from megatron_upipe.planning.report import report

    scenarios = [_scenario(args, method) for method in dict.fromkeys(args.method)]
    for scenario in scenarios:
        scenario.check()
    if args.timeline and not Path(args.timeline).absolute().parent.is_dir():
        raise UPipeError(f"--timeline {args.timeline} is not in an existing folder; name one")
    reports = []
    for scenario in scenarios:
        started = time.monotonic()
        print(
            f"simulating {scenario.method} at {tokens_text(scenario.tokens)} ...", end="", file=sys.stderr, flush=True
        )
        reports.append(report(scenario))
        print(f" {time.monotonic() - started:.0f} s", file=sys.stderr)
    usable = args.gpu_memory - RESERVE_GIB
    fits = {r.scenario.method: r.device_peak / 2**30 <= usable and r.host / 2**30 <= args.host_memory for r in reports}
    if args.json:
        methods = {r.scenario.method: {**r.as_json(), "fits": fits[r.scenario.method]} for r in reports}
        head = dict(model=args.model, gpus=args.gpus, tokens=scenarios[0].tokens, simulated=True)
        print(json.dumps({**head, "usable_gib": usable, "methods": methods}, indent=1))
    else:
        for r in reports:
            verdict = "fits" if fits[r.scenario.method] else "DOES NOT FIT"
            room = f"{args.gpu_memory:g} GiB less {RESERVE_GIB:g} of reserve, and {args.host_memory:g} GiB of a node"
            print(f"{r.text()}\n  {verdict} in {room}\n")
    if args.timeline:
        _draw(reports, Path(args.timeline))
    return 0 if all(fits.values()) else 1


def _scenario(args: argparse.Namespace, method: str) -> Scenario:
    return Scenario(
        model=find_model(args.model),
        gpus=args.gpus,
        tokens=parse_tokens(args.tokens),
        method=method,
        gpus_per_node=args.gpus_per_node,
        tensor_parallel=args.tp,
        ulysses=args.ulysses,
        ring=args.ring,
        heads_per_stage=args.heads_per_stage,
        keep_attention=args.keep_attention,
        offload=args.offload,
        prefetch=args.prefetch,
        checkpoint_every=args.checkpoint_every,
        mlp_tile_tokens=args.mlp_tile_tokens,
        loss_tile_tokens=args.loss_tile_tokens,
        attention_backend=args.kernel,
        sharding=args.sharding,
        optimizer_on_host=args.optimizer == "host",
    )


def _draw(reports: list, path: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UPipeError("--timeline needs matplotlib; pip install matplotlib") from error
    figure, axes = plt.subplots(figsize=(10, 5))
    for r in reports:
        if r.step is None:
            continue
        states = r.scenario.states.sharded
        line = [(states + size) / 2**30 for size in r.step.timeline]
        axes.plot([i / len(line) for i in range(len(line))], line, label=r.scenario.method, linewidth=0.8)
        axes.axhline(states / 2**30, color="grey", linewidth=0.5)
    axes.set_xlabel("a step of the simulated layers, embedding and loss")
    axes.set_ylabel("GiB on the device, states included (simulated)")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    print(f"timeline: {path}", file=sys.stderr)
