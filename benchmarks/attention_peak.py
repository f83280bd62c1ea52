"""Measured peak of live bytes of one UPipe attention block, forward and backward, for several heads per stage.

    torchrun --nproc-per-node 4 benchmarks/attention_peak.py --ulysses 2 --ring 2 --heads-per-stage 2 4 8

Counts tensors (see ``megatron_upipe.planning.live_bytes``) on rank 0, weights left out; CPU and gloo.
"""

import argparse
import json

import torch
import torch.distributed as dist

from megatron_upipe.attention.function import AttentionCall, UPipeAttentionFunction
from megatron_upipe.attention.plan import AttentionParameters, AttentionPlan, Elementwise
from megatron_upipe.attention.schedule import head_schedule
from megatron_upipe.context.groups import ContextGroups
from megatron_upipe.context.layout import SequenceLayout
from megatron_upipe.context.segments import one_document
from megatron_upipe.kernels.select import select_kernel
from megatron_upipe.planning.live_bytes import LiveBytes

REPEATS = 8  # the least counts: gloo's threads let go of exchanged tensors a little later now and then


def make_groups(p: int, r: int) -> ContextGroups:
    """Ulysses groups of P consecutive ranks, ring groups of R ranks with stride P. Collective over the world."""
    rank = dist.get_rank()
    ulysses = [dist.new_group(list(range(i * p, (i + 1) * p))) for i in range(r)][rank // p]
    ring = [dist.new_group(list(range(u, p * r, p))) for u in range(p)][rank % p]
    return ContextGroups(SequenceLayout(p, r), ulysses if p > 1 else None, ring if r > 1 else None)


def same(tensor: torch.Tensor, parameters: None = None) -> torch.Tensor:
    return tensor


def peak_bytes(args: argparse.Namespace, groups: ContextGroups, heads_per_stage: int) -> int:
    """Peak of forward and backward with U = ``heads_per_stage``; collective."""
    d, hidden, dtype = args.head_dim, args.hidden, getattr(torch, args.dtype)
    torch.manual_seed(0)
    tokens = args.seq_length // groups.layout.size
    x = torch.randn(tokens, args.micro_batch, hidden, dtype=dtype, requires_grad=True)
    qkv = torch.randn((args.heads + 2 * args.kv_heads) * d, hidden, dtype=dtype, requires_grad=True)
    proj = torch.randn(hidden, args.heads * d, dtype=dtype, requires_grad=True)
    plan = AttentionPlan(
        schedule=head_schedule(args.heads, args.kv_heads, args.ulysses, heads_per_stage),
        groups=groups,
        kernel=select_kernel(x.device, dtype, d),
        head_dim=d,
        scale=d**-0.5,
        causal=True,
    )
    call = AttentionCall(
        plan=plan,
        elementwise=Elementwise(same, same, linear=True),
        parameters=lambda: AttentionParameters(qkv, None, proj),
        gather=same,
        reduce=same,
        segments=one_document(groups.layout, args.seq_length),
    )
    peaks = []
    for _ in range(REPEATS):
        x.grad = qkv.grad = proj.grad = None
        with LiveBytes() as live:
            live.count(x)
            y = UPipeAttentionFunction.apply(True, call, x, *call.parameters())
            y = y.mul(1.0).sum()  # lets go of the output, as a residual connection does
            y.backward()
        peaks.append(live.peak)
    return min(peaks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ulysses", type=int, default=2, help="P")
    parser.add_argument("--ring", type=int, default=2, help="R")
    parser.add_argument("--heads-per-stage", type=int, nargs="+", default=[2, 8], help="values of U")
    parser.add_argument("--heads", type=int, default=8, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    groups = make_groups(args.ulysses, args.ring)
    peaks = {u: peak_bytes(args, groups, u) for u in args.heads_per_stage}
    if dist.get_rank() == 0:
        tokens = args.seq_length // groups.layout.size
        u1 = tokens * args.micro_batch * args.heads * args.head_dim * getattr(torch, args.dtype).itemsize
        if args.json:
            print(json.dumps({"u1_bytes": u1, "peak_bytes": peaks}))
        else:
            for u, peak in peaks.items():
                print(f"U = {u:4}: {peak:12,} bytes = {peak / u1:.2f} x [s, b, H*d]")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
