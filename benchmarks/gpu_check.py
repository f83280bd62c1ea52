"""One GPU, one command, a few minutes: is every attention backend right, how fast is it, does memory fall as it must?

    python benchmarks/gpu_check.py --json gpu_check.json

Needs torch and this package; flash-attn and TransformerEngine are tried where they are installed. Prints one table.
``--device cpu`` tries the script itself on small shapes, where its numbers mean nothing.

* errors: 2-norm against explicit softmax in fp64, over what explicit softmax errs in the same precision; at most 2
* masks: sliding windows and packed documents against explicit softmax in fp64
* merged: gradients of two blocks of keys with the global out and lse against those of all keys at once
* 2^31: rows behind element 2^31 against the same rows computed alone
* speed: of a stage of Llama3-8B with U = P = 8 on 8 GPUs, one query head to one KV head over the whole sequence
* stages: attention of one GPU's 32 heads in stages of 4 against all at once, forward and backward, by turns, medians;
  peak memory as allocated by torch beside what is counted from tensors and the kernel's stated workspace
* fp8 (``gpu_check_fp8.py``): products by each recipe against fp64 and the plain-torch twin, whether pieces of a weight
  and a second computation give the same bits, bf16 over FP8 seconds; attention by each mode
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import gpu_check_fp8
import torch
from torch import Tensor

from megatron_upipe.attention.backward import AttentionNeeds, attention_backward
from megatron_upipe.attention.forward import attention_forward
from megatron_upipe.attention.input import AttentionInput
from megatron_upipe.attention.kept import KeptAttention
from megatron_upipe.attention.plan import AttentionParameters, AttentionPlan, AttentionWeights, Elementwise
from megatron_upipe.attention.schedule import head_schedule
from megatron_upipe.context.groups import ContextGroups
from megatron_upipe.context.layout import SequenceLayout
from megatron_upipe.context.segments import Segments, one_document
from megatron_upipe.kernels.protocol import Documents, Kernel
from megatron_upipe.kernels.reference import ReferenceKernel
from megatron_upipe.kernels.select import KERNELS
from megatron_upipe.planning.live_bytes import LiveBytes

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 32, 8, 128, 4096  # Llama3-8B
DTYPE = torch.bfloat16
SMALL = dict(tokens=96, speed=[128], staged=[64], hidden=64, head_dim=8, edge=0)
REAL = dict(
    tokens=2048, speed=[131072, 262144, 524288], staged=[16384, 65536], hidden=HIDDEN, head_dim=HEAD_DIM, edge=2**31
)


class Check:
    """Results as they come, printed as they come."""

    def __init__(self, device: torch.device, sizes: dict, seconds: float) -> None:
        self.device, self.sizes = device, sizes
        self.rows: list[dict] = []
        self._end = time.monotonic() + seconds

    def row(self, check: str, backend: str, good: bool | None, **numbers: float | str) -> None:
        self.rows.append(dict(check=check, backend=backend, good=good, **numbers))
        shown = "  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in numbers.items())
        verdict = {True: "ok", False: "WRONG", None: ""}[good]
        print(f"{check:12}{backend:18}{verdict:7}{shown}", flush=True)

    def late(self) -> bool:
        return time.monotonic() > self._end

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=DTYPE)

    def seconds(self, call: Callable[..., object], *args: object) -> float:
        self.wait()
        start = time.perf_counter()
        call(*args)
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def serving(check: Check) -> list[Kernel]:
    """Backends that serve here; the others' reasons are rows."""
    found = []
    for kernel in KERNELS:
        reason = kernel.refuses(check.device, DTYPE, check.sizes["head_dim"])
        if reason is None:
            found.append(kernel)
        else:
            check.row("passed over", kernel.name, None, reason=reason)
    return found


def _run(kernel: Kernel, tensors: list[Tensor], causal: bool) -> list[Tensor]:
    q, k, v, dout = tensors
    scale = q.shape[-1] ** -0.5
    out, lse = kernel.forward(q, k, v, causal, scale)
    return [out, lse, *kernel.backward(dout, q, k, v, out, lse, causal, scale)]


def errors(check: Check, kernel: Kernel) -> None:
    d, l = check.sizes["head_dim"], check.sizes["tokens"]
    names = ("out", "lse", "dq", "dk", "dv")
    for causal in (True, False):
        for heads, kv_heads in ((4, 1), (8, 8)):
            shapes = ((heads, l), (kv_heads, l), (kv_heads, l), (heads, l))
            tensors = [check.random(2, n, tokens, d) for n, tokens in shapes]
            wanted = _run(ReferenceKernel(), [t.double() for t in tensors], causal)
            plain = _plain(*tensors, causal)
            ratios = {}
            for name, found, want in zip(names, _run(kernel, tensors, causal), wanted, strict=True):
                if name == "lse":
                    ratios[name] = (found.double() - want).abs().max().item() / 1e-2
                else:
                    allowed = (plain[name].double() - want).norm()
                    ratios[name] = ((found.double() - want).norm() / allowed).item()
            good = all(ratio <= 2 for ratio in ratios.values())
            what = f"{heads}/{kv_heads}{' causal' if causal else ''}"
            check.row("errors", kernel.name, good, heads=what, **ratios)


def _plain(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> dict[str, Tensor]:
    """Explicit softmax by autograd, everything in the inputs' precision."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    repeats = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(repeats, 1) for t in leaves[1:])
    scores = leaves[0] @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    out = scores.softmax(-1) @ values
    gradients = torch.autograd.grad(out, leaves, dout)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


def merged(check: Check, kernel: Kernel) -> None:
    d, l = check.sizes["head_dim"], check.sizes["tokens"]
    q, k, v, dout = (check.random(1, n, l, d) for n in (4, 2, 2, 4))
    scale = d**-0.5
    out, lse, *whole = _run(kernel, [q, k, v, dout], False)
    half = l // 2
    parts = [
        kernel.backward(dout, q, k[:, :, keys], v[:, :, keys], out, lse, False, scale)
        for keys in (slice(half), slice(half, None))
    ]
    keys_and_values = [torch.cat(pair, 2) for pair in zip(*(part[1:] for part in parts), strict=True)]
    found = (parts[0][0].float() + parts[1][0].float(), *keys_and_values)
    worst = max(((f.float() - w.float()).norm() / w.float().norm()).item() for f, w in zip(found, whole, strict=True))
    check.row("merged", kernel.name, worst < 0.01, difference=worst)


def masks(check: Check, kernel: Kernel) -> None:
    d, l = check.sizes["head_dim"], check.sizes["tokens"]
    uneven = (1, l // 2, 3, l - l // 2 - 4)
    keys = (l // 3, 1, l // 2, 5)
    found: dict[str, tuple[bool, int | None, tuple | None]] = {
        "documents": (True, None, (uneven, uneven)),
        "documents of other keys": (False, None, (uneven, keys)),
    }
    if kernel.windows:
        found |= {
            "window": (True, l // 8, None),
            "band": (False, l // 8, None),
            "documents and window": (True, l // 8, (uneven, uneven)),
        }
    for name, (causal, left, lengths) in found.items():
        documents = None if lengths is None else Documents.of(*lengths, check.device)
        q, dout = (check.random(1, 8, l, d) for _ in range(2))
        k, v = (check.random(1, 2, l if lengths is None else sum(lengths[1]), d) for _ in range(2))
        rest = (causal, d**-0.5, left, documents)
        exact = [t.double() for t in (q, k, v)]
        wanted, lse = ReferenceKernel().forward(*exact, *rest)
        gradients = ReferenceKernel().backward(dout.double(), *exact, wanted, lse, *rest)
        out, found_lse = kernel.forward(q, k, v, *rest)
        results = (out, found_lse, *kernel.backward(dout, q, k, v, out, found_lse, *rest))
        pairs = zip(results, (wanted, lse, *gradients), strict=True)
        worst = max(((f.double() - w).norm() / w.norm()).item() for f, w in pairs)
        check.row("masks", kernel.name, worst < 0.02, mask=name, difference=worst)


def edge(check: Check, kernel: Kernel) -> None:
    """Queries with just more than 2^31 elements, and just fewer."""
    if not check.sizes["edge"] or kernel.name == "reference":
        return
    d, heads = check.sizes["head_dim"], 16
    for more in (-1, 1):
        tokens = check.sizes["edge"] // (heads * d) + more * 128
        q, dout = (check.random(1, heads, tokens, d) for _ in range(2))
        k, v = (check.random(1, heads, 256, d) for _ in range(2))
        out, lse, dq, *_ = _run(kernel, [q, k, v, dout], False)
        last = slice(tokens - 256, tokens)
        alone = _run(kernel, [q[:, :, last].contiguous(), k, v, dout[:, :, last].contiguous()], False)
        same = all(
            torch.allclose(a[:, :, last].float(), b.float(), rtol=0.02, atol=0.02)
            for a, b in zip((out, lse, dq), alone[:3], strict=True)
        )
        check.row("2^31", kernel.name, same, elements=f"2^31 {more * 128 * heads * d:+}")
        del q, dout, k, v, out, lse, dq, alone


def speed(check: Check, kernel: Kernel) -> None:
    if kernel.name == "reference" and check.device.type == "cuda":
        return
    d = check.sizes["head_dim"]
    for tokens in check.sizes["speed"]:
        if check.late():
            return
        q, k, v, dout = (check.random(1, 1, tokens, d) for _ in range(4))
        scale = d**-0.5
        out, lse = kernel.forward(q, k, v, True, scale)
        forward = statistics.median(check.seconds(kernel.forward, q, k, v, True, scale) for _ in range(5))
        arguments = (dout, q, k, v, out, lse, True, scale)
        kernel.backward(*arguments)
        backward = statistics.median(check.seconds(kernel.backward, *arguments) for _ in range(5))
        work = 2 * tokens * tokens * d  # of one product, halved by the mask, times two for multiply and add
        rates = dict(forward_tflops=2 * work / forward / 1e12, backward_tflops=5 * work / backward / 1e12)
        check.row("speed", kernel.name, None, tokens=tokens, **rates)


def stages(check: Check, kernel: Kernel) -> None:
    """32 heads in stages of 4 against all at once."""
    if kernel.name == "reference" and check.device.type == "cuda":
        return
    d, hidden = check.sizes["head_dim"], check.sizes["hidden"]
    weights = AttentionParameters(
        check.random((HEADS + 2 * KV_HEADS) * d, hidden) / hidden**0.5, None, check.random(hidden, HEADS * d) / 64
    )
    elementwise = Elementwise(lambda t, _: t, lambda t, _: t, linear=True)
    for tokens in check.sizes["staged"]:
        if check.late():
            return
        x, dy = (check.random(tokens, 1, hidden) for _ in range(2))
        u1 = tokens * HEADS * d * DTYPE.itemsize
        plans = {u: _plan(kernel, u, d) for u in (4, HEADS)}
        seconds: dict[int, list[float]] = {u: [] for u in plans}
        again: list[float] = []
        for index in range(4):
            for u, plan in plans.items():
                taken = check.seconds(_step, x, dy, weights, elementwise, plan)
                first = check.seconds(_forward, x, weights, elementwise, plan)
                if index:
                    seconds[u].append(taken)
                    again += [first / (taken + first)] if u == 4 else []
        numbers: dict[str, float] = {"staged/whole": statistics.median(seconds[4]) / statistics.median(seconds[HEADS])}
        numbers["keep/input"] = 1 - statistics.median(again)
        for u, plan in plans.items():
            step = partial(_step, x, dy, weights, elementwise, plan)
            numbers |= _peaks(check, u, u1, step, kernel, tokens)
        check.row("stages", kernel.name, None, tokens=tokens, **numbers)


def _plan(kernel: Kernel, heads_per_stage: int, head_dim: int) -> AttentionPlan:
    return AttentionPlan(
        schedule=head_schedule(HEADS, KV_HEADS, 1, heads_per_stage),
        groups=ContextGroups(SequenceLayout(1, 1), None, None),
        kernel=kernel,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        causal=True,
    )


def _forward(x: Tensor, weights: AttentionParameters, elementwise: Elementwise, plan: AttentionPlan) -> KeptAttention:
    read = AttentionWeights.of(weights, plan.precision)
    return attention_forward(AttentionInput(x, plan.precision), read, elementwise, plan, _whole(x))


def _whole(x: Tensor) -> Segments:
    return one_document(SequenceLayout(1, 1), x.shape[0])


def _step(x: Tensor, dy: Tensor, weights: AttentionParameters, elementwise: Elementwise, plan: AttentionPlan) -> None:
    kept = _forward(x, weights, elementwise, plan)
    read = AttentionWeights.of(weights, plan.precision)
    tokens = AttentionInput(x, plan.precision, backward=True)
    attention_backward(dy, tokens, kept, read, elementwise, plan, AttentionNeeds(True, True, False, True), _whole(x))


def _peaks(check: Check, u: int, u1: int, step: Callable[[], None], kernel: Kernel, tokens: int) -> dict[str, float]:
    """Bytes beyond x, dy and weights, in u1: as torch allocated them, and as counted."""
    with LiveBytes() as live:
        step()
    counted = live.peak + kernel.workspace_bytes(1, u, tokens, check.sizes["head_dim"])
    found = {f"counted U {u}": counted / u1}
    if check.device.type == "cuda":
        check.wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        check.wait()
        found[f"allocated U {u}"] = (torch.cuda.max_memory_allocated() - before) / u1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, default=420, help="no further speed rows are begun after these")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, too")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU here; nothing was measured", file=sys.stderr)
        return 2
    device = torch.device(args.device)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU, small shapes, speeds mean nothing"
    print(f"{name}; torch {torch.__version__}")
    check = Check(device, REAL if args.device == "cuda" else SMALL, args.seconds)
    torch.manual_seed(0)
    kernels, precisions = serving(check), gpu_check_fp8.precisions(check)
    for parts, subjects in (
        ((errors, masks, merged), kernels),
        ((gpu_check_fp8.products,), precisions),
        ((gpu_check_fp8.attention,), ("forward", "full")),
        ((edge, speed, stages), kernels),
        ((gpu_check_fp8.product_speed,), precisions),
    ):
        for part in parts:
            for subject in subjects:
                try:
                    part(check, subject)
                except Exception as error:  # a backend that fails must not hide the others
                    name = getattr(subject, "name", str(subject)[:16])
                    check.row(part.__name__, name, False, error=f"{type(error).__name__}: {str(error)[:200]}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"device": name, "torch": torch.__version__, "rows": check.rows}, file, indent=1)
    wrong = [row for row in check.rows if row["good"] is False]
    print(f"{len(wrong)} of {sum(row['good'] is not None for row in check.rows)} checks failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
