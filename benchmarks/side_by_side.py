"""Measuring candidates side by side: pairs by turns in one process group, intervals by bootstrap, bytes and errors."""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from candidates import Candidate, Sizes
from prompt_exchange import prompt_exchanges
from torch import Tensor

from megatron_upipe.planning.ledger import RECEIVED, Ledger

RESAMPLES = 2000


def shard(candidate: Candidate, x: Tensor) -> Tensor:
    """This rank's tokens of the whole ``x`` [S, 1, hidden]."""
    return x[candidate.positions(x.shape[0]).to(x.device)].clone().requires_grad_()


def step(candidate: Candidate, x: Tensor) -> float:
    """Seconds of one forward and backward pass on ``shard``s, until the last rank is done. Collective."""
    x.grad = None
    for weight in candidate.weights:
        weight.grad = None
    _wait_for_all(x.device)
    start = time.perf_counter()
    candidate.run(x).sum().backward()
    _wait_for_all(x.device)
    return time.perf_counter() - start


def _wait_for_all(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def pairs_of(a: Candidate, b: Candidate, x: Tensor, count: int, warm_up: int) -> list[tuple[float, float]]:
    """Seconds of both, one after the other, who is first by turns. Collective."""
    xa, xb = shard(a, x), shard(b, x)
    found = []
    for i in range(warm_up + count):
        if i % 2:
            second, first = step(b, xb), step(a, xa)
        else:
            first, second = step(a, xa), step(b, xb)
        if i >= warm_up:
            found.append((first, second))
    return found


def ratio(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Median of b over a, and the 95 % interval of that by bootstrap over the pairs."""
    ratios = [b / a for a, b in pairs]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return statistics.median(ratios), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]


class Traffic(Ledger):
    """Also of functional collectives, which some peers use."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func._schema.name == "_c10d_functional::all_to_all_single":
            sent = args[0]
            own = args[2][dist.get_rank()] / max(1, sum(args[2])) if args[2] else 1 / dist.get_world_size()
            self.sent["exchange"] += round(sent.nbytes * (1 - own))
            self.collectives["exchange"] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def traffic(candidate: Candidate, x: Tensor) -> dict[str, Any]:
    """Peak of live bytes of a step, without weights, the bytes that this rank sends and its collectives. Collective."""
    mine = shard(candidate, x)
    step(candidate, mine)
    for weight in candidate.weights:
        weight.grad = None
    mine.grad = None
    with prompt_exchanges(), Traffic() as ledger:
        ledger.count(mine)
        candidate.run(mine).mul(1.0).sum().backward()
    dist.barrier()
    sent, collectives = ({k: v for k, v in c.items() if k != RECEIVED} for c in (ledger.sent, ledger.collectives))
    return {"peak_bytes": ledger.peak, "sent_bytes": sent, "collectives": collectives}


def errors(candidate: Candidate, sizes: Sizes, tokens: int) -> dict[str, float]:
    """Largest errors of an attention block against explicit fp64 attention of the whole sequence, over the largest
    element. Collective."""
    torch.manual_seed(1)
    whole = torch.randn(tokens, 1, sizes.hidden, dtype=torch.float64)
    cotangent = torch.randn(tokens, 1, sizes.hidden, dtype=torch.float64)
    weights = [w.detach().double().cpu().requires_grad_() for w in candidate.weights]
    x = whole.to(sizes.dtype).double().requires_grad_()
    g = sizes.heads // sizes.kv_heads
    rows = F.linear(x, weights[0]).unflatten(2, (sizes.kv_heads, g + 2, sizes.head_dim))
    q, k, v = rows[:, :, :, :g].flatten(2, 3), rows[:, :, :, g], rows[:, :, :, g + 1]
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    y = F.linear(out.permute(2, 0, 1, 3).flatten(2), weights[1])
    wanted = [y, *torch.autograd.grad(y, (x, *weights), cotangent.to(sizes.dtype).double())]

    for weight in candidate.weights:
        weight.grad = None
    mine = shard(candidate, whole.to(sizes.device, sizes.dtype))
    places = candidate.positions(tokens)
    found = candidate.run(mine)
    found.backward(cotangent[places].to(found))
    gradients = [w.grad.double() for w in candidate.weights]
    for gradient in gradients:
        dist.all_reduce(gradient)
    pairs = [(found, wanted[0][places]), (mine.grad, wanted[1][places]), *zip(gradients, wanted[2:], strict=True)]
    worst = [((a.double().cpu() - b).abs().max() / b.abs().max()).item() for a, b in pairs]
    total = torch.tensor(worst, dtype=torch.float64, device=sizes.device)
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    return dict(zip(("y", "dx", "linear_qkv", "linear_proj"), total.tolist(), strict=True))


WHOLE = "whole step, barriers included"


def stage_times(a: Candidate, b: Candidate, x: Tensor, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of a step of each in the named parts of its stages, with what they call; both profiled by turns.
    Methods without stages have only the whole. Collective."""
    shards = shard(a, x), shard(b, x)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if x.is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    spent: Callable[[Any], float] = lambda e: e.device_time_total if x.is_cuda else e.cpu_time_total  # noqa: E731
    found: tuple[dict[str, list[float]], ...] = (defaultdict(list), defaultdict(list))
    for _ in range(steps):
        for candidate, mine, parts in zip((a, b), shards, found, strict=True):
            with torch.profiler.profile(activities=activities) as profile:
                seconds = step(candidate, mine)
            for event in profile.key_averages():
                if event.key.startswith("upipe"):
                    parts[event.key].append(spent(event) / 1e3)
            parts[WHOLE].append(1e3 * seconds)
    first, second = ({part: statistics.median(ms) for part, ms in parts.items()} for parts in found)
    return first, second
