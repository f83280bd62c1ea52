"""FP8 rows of ``gpu_check.py``: products by each recipe, attention by each mode."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_upipe.attention.input import AttentionInput
from megatron_upipe.errors import UPipeError
from megatron_upipe.kernels.protocol import Kernel
from megatron_upipe.kernels.reference import ReferenceKernel
from megatron_upipe.kernels.select import fp8_kernel, select_kernel
from megatron_upipe.precision.plain import PLAIN
from megatron_upipe.precision.protocol import Precision, Weight
from megatron_upipe.precision.recipes import ALIGNMENT, Fp8Recipe
from megatron_upipe.precision.select import select_precision
from megatron_upipe.precision.twin import TwinPrecision

DTYPE = torch.bfloat16
ERRORS = dict(y=0.045, dx=0.07, dw=0.07)  # of normally distributed numbers: E4M3 3.8 %, with E5M2 gradients 5.9 %
# by the twin, which shares scales and roundings: only orders of summation differ, and rounding results to bf16
FROM_TWIN = 5e-3
ATTENTION_ERROR = 0.1


def precisions(check: Any) -> list[TwinPrecision | Precision]:
    """Those that this device has, gradients in E5M2; reasons of the others are rows."""
    found = []
    for name in ALIGNMENT:
        try:
            found.append(select_precision(Fp8Recipe(name, True), check.device, DTYPE))
        except UPipeError as error:
            check.row("passed over", name, None, reason=str(error))
    return found


def products(check: Any, precision: Precision) -> None:
    """Errors against fp64, difference from the twin, and that pieces and repetitions do not change a bit."""
    name = precision.recipe.name
    x, w, dy = check.random(512, 384), check.random(1024, 384), check.random(512, 1024)
    wanted = dict(y=x.double() @ w.double().t(), dx=dy.double() @ w.double(), dw=dy.double().t() @ x.double())
    found, twin = _all(precision, x, w, dy), _all(TwinPrecision(precision.recipe), x, w, dy)
    errors = {key: _error(found[key], want) for key, want in wanted.items()}
    check.row("fp8 errors", name, all(errors[key] < ERRORS[key] for key in errors), **errors)
    differences = {key: _error(found[key], twin[key].double()) for key in found}
    check.row("fp8 twin", name, max(differences.values()) < FROM_TWIN, **differences)

    weight, tokens = Weight(w, precision), precision.tokens(x, True, False)
    parts: list[Callable[[Tensor], Tensor]] = [lambda t, i=i: t[i * 256 : (i + 1) * 256] for i in range(4)]
    pieces = torch.cat([precision.product(tokens, weight.rows(part)) for part in parts], 1)
    # x as a layer reads it, normed in tiles: in forward, and in backward with what weight gradients need
    reads = [AttentionInput(x.unsqueeze(1), precision, lambda t: t * 1.5, 128, backward) for backward in (False, True)]
    first, again = (read.project(Weight(w, precision).rows(*parts[2:]), None) for read in reads)
    total = torch.zeros(1024, 384, dtype=torch.float32, device=x.device)
    summed = precision.weight_gradient(precision.gradient(dy), precision.tokens(x, False, True), torch.float32, total)
    check.row(
        "fp8 pieces",
        name,
        _error(pieces, found["y"].double()) < FROM_TWIN and torch.equal(first, again),
        pieces_equal_bits=str(torch.equal(pieces, found["y"])),
        backward_repeats_forward=str(torch.equal(first, again)),
        sum_into_total=_error(summed, found["dw"].double()),
    )


def product_speed(check: Any, precision: Precision) -> None:
    """bf16 over FP8 seconds, quantising included as UPipe does it: tokens once for ``stages`` stages. By turns."""
    hidden, d, stages = check.sizes["hidden"], check.sizes["head_dim"], 4
    hidden, width = max(hidden, 128), 8 * max(d, 16)
    for tokens in check.sizes["staged"]:
        if check.late():
            return
        tokens = max(tokens, 128)  # noqa: PLW2901
        x, w, dy = check.random(tokens, hidden), check.random(stages * width, hidden), check.random(tokens, width)
        seconds: dict[str, list[float]] = {"bf16": [], "fp8": []}
        for index in range(4):
            for key, which in (("bf16", PLAIN), ("fp8", precision)):
                taken = check.seconds(_staged, which, x, w, dy, stages)
                if index:
                    seconds[key].append(taken)
        ratio = statistics.median(seconds["bf16"]) / statistics.median(seconds["fp8"])
        check.row("fp8 speed", precision.recipe.name, None, tokens=tokens, **{"bf16/fp8": ratio})


def attention(check: Any, mode: str) -> None:
    """FP8 attention against explicit softmax in fp64; forward and backward seconds over those of the 16-bit kernel."""
    d = max(check.sizes["head_dim"], 32)
    name = f"attention {mode}"
    base = select_kernel(check.device, DTYPE, d)
    try:
        kernel = fp8_kernel(mode, base, check.device, DTYPE, d)
    except UPipeError as error:
        check.row("passed over", name, None, reason=str(error))
        return
    tokens = max(check.sizes["tokens"] // 128 * 128, 128)
    for causal, heads, kv_heads, width in ((True, 4, 4, d), (False, 4, 4, d), (True, 1, 1, 128), (True, 4, 2, 64)):
        q, k, v, dout = (check.random(2, n, tokens, width) for n in (heads, kv_heads, kv_heads, heads))
        wanted = _attended(ReferenceKernel(), *(t.double() for t in (q, k, v, dout)), causal)
        found = _attended(kernel, q, k, v, dout, causal)
        errors = {key: _error(found[key], wanted[key]) for key in ("out", "dq", "dk", "dv")}
        what = f"{heads}/{kv_heads} x {width}{' causal' if causal else ''}"
        check.row("fp8 errors", name, max(errors.values()) < ATTENTION_ERROR, heads=what, **errors)
    for tokens in check.sizes["speed"][:1]:
        if check.late():
            return
        q, k, v, dout = (check.random(1, 128 // d or 1, tokens, d) for _ in range(4))
        seconds: dict[str, list[float]] = {"base": [], "fp8": []}
        for index in range(4):
            for key, which in (("base", base), ("fp8", kernel)):
                taken = check.seconds(partial(_attended, which, q, k, v, dout, True))
                if index:
                    seconds[key].append(taken)
        ratio = statistics.median(seconds["base"]) / statistics.median(seconds["fp8"])
        check.row("fp8 speed", name, None, tokens=tokens, **{f"{base.name}/fp8": ratio})


def _all(precision: Precision, x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Tensor]:
    weight, tokens, gradient = Weight(w, precision), precision.tokens(x, True, True), precision.gradient(dy)
    return dict(
        y=precision.product(tokens, weight.rows()),
        dx=precision.input_gradient(gradient, weight.rows(backward=True)),
        dw=precision.weight_gradient(gradient, tokens, torch.float32),
    )


def _staged(precision: Precision, x: Tensor, w: Tensor, dy: Tensor, stages: int) -> None:
    weight, tokens, width = Weight(w, precision), precision.tokens(x, True, True), dy.shape[1]
    total = torch.zeros_like(x)
    for stage in range(stages):
        rows = partial(torch.narrow, dim=0, start=stage * width, length=width)
        precision.product(tokens, weight.rows(rows))
        gradient = precision.gradient(dy)
        precision.input_gradient(gradient, weight.rows(rows, backward=True), total)
        precision.weight_gradient(gradient, tokens, torch.float32)


def _attended(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> dict[str, Tensor]:
    scale = q.shape[-1] ** -0.5
    out, lse = kernel.forward(q, k, v, causal, scale)
    gradients = kernel.backward(dout, q, k, v, out, lse, causal, scale)
    return dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))


def _error(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()
