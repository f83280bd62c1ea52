"""Step time of a UPipe layer that keeps its attention over one that computes it again, side by side; CPU and gloo.

    torchrun --nproc-per-node 2 benchmarks/keep_vs_recompute.py

Both layers run forward and backward by turns in one process group; the ratio is that of the medians on rank 0. FLOPs of
attention count 2 matrix products forward and 5 backward, of which the causal mask leaves half.
"""

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module

from megatron_upipe.integration import cpu
from megatron_upipe.integration.selftest.layers import SWIGLU
from megatron_upipe.integration.selftest.parity import Case, initialize, make_config
from megatron_upipe.layer_specs import upipe_layer_spec

KEEP, INPUT = "keep", "input"


def make_layer(args: argparse.Namespace, kept_layers: int) -> torch.nn.Module:
    ranks = dist.get_world_size()
    case = Case(
        args.heads,
        args.kv_heads,
        args.heads_per_stage,
        head_dim=args.hidden // args.heads,
        hidden=args.hidden,
        config=SWIGLU,
        upipe=dict(keep_attention=kept_layers),
    )
    config = make_config(case, ranks, 1, ffn_hidden_size=int(3.5 * args.hidden), params_dtype=torch.float32)
    torch.manual_seed(0)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return build_module(upipe_layer_spec, config=config, layer_number=1, pg_collection=groups)


def step(layer: torch.nn.Module, x: torch.Tensor) -> float:
    """Seconds of one forward and backward pass."""
    x = x.clone().requires_grad_()
    dist.barrier()
    start = time.perf_counter()
    y, _ = layer(x, None)
    y.sum().backward()
    return time.perf_counter() - start


def attention_share(args: argparse.Namespace) -> float:
    """Of the FLOPs of a step that computes attention once: 7 half products of S x S for attention; for the linears 3
    products forward and backward, and the projections and the MLP's first half once more."""
    h, s = args.hidden, args.seq_length
    attention = 7 * s * s * h
    projections = (2 + 2 * args.kv_heads / args.heads) * h * h
    return attention / (attention + 2 * s * 4 * (projections + 3 * 3.5 * h * h))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-length", type=int, default=24576)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--heads-per-stage", type=int, default=None, help="U; the world's size by default")
    parser.add_argument("--steps", type=int, default=5, help="of each, after one that is not counted")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    cpu.install()
    dist.init_process_group("gloo")
    initialize(dist.get_world_size(), 1)
    layers = {KEEP: make_layer(args, 1), INPUT: make_layer(args, 0)}
    x = torch.randn(args.seq_length // dist.get_world_size(), 1, args.hidden)
    seconds: dict[str, list[float]] = {KEEP: [], INPUT: []}
    for index in range(args.steps + 1):
        for policy, layer in layers.items():
            taken = step(layer, x)
            if index:
                seconds[policy].append(taken)
    medians = {policy: statistics.median(values) for policy, values in seconds.items()}
    result = {
        "attention_share_of_flops": round(attention_share(args), 3),
        "median_seconds": medians,
        "keep_over_input": round(medians[KEEP] / medians[INPUT], 3),
        "spread": {policy: [min(v), max(v)] for policy, v in seconds.items()},
    }
    if dist.get_rank() == 0:
        if args.json:
            print(json.dumps(result))
        else:
            print(f"attention is {result['attention_share_of_flops']:.0%} of the FLOPs")
            for policy, median in medians.items():
                low, high = result["spread"][policy]
                print(f"{policy:6} {median:.3f} s a step (median of {args.steps}, {low:.3f} to {high:.3f})")
            print(f"keep / input = {result['keep_over_input']:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
