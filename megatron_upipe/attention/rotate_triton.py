"""The Triton kernel of ``rotate.py``. All index arithmetic is in 64 bits. Not run on a GPU so far."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS = 8  # of the rows of a program, which is one token and batch element


@triton.jit
def _rounded(x, kind: tl.constexpr):
    """To the nearest, ties to even; Triton's interpreter cuts bf16 off."""
    if kind == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        x = tl.where(x == x, nearest, x)  # noqa: PLR0124 (NaN stays)
    return x.to(kind)


@triton.jit
def _rotate(
    source, target, cos, sin,
    batch, n, rows,
    s_s, s_b, s_p, s_n, s_d,
    t_s, t_b, t_p, t_n, t_d,
    c_s,
    HALF: tl.constexpr, D: tl.constexpr, HALF_2: tl.constexpr, REST_2: tl.constexpr, ROWS: tl.constexpr,
    BACK: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    token, element = place // batch, place % batch
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    here = (row < rows)[:, None]
    from_row = (token * s_s + element * s_b + (row // n) * s_p + (row % n) * s_n)[:, None]
    to_row = (token * t_s + element * t_b + (row // n) * t_p + (row % n) * t_n)[:, None]

    i = tl.arange(0, HALF_2).to(tl.int64)
    there = i < HALF
    mask = here & there[None, :]
    first = tl.load(source + from_row + i[None, :] * s_d, mask=mask, other=0.0)
    second = tl.load(source + from_row + (i[None, :] + HALF) * s_d, mask=mask, other=0.0)
    angles = token * c_s + i
    cos_1, cos_2 = tl.load(cos + angles, mask=there, other=0.0), tl.load(cos + angles + HALF, mask=there, other=0.0)
    sin_1, sin_2 = tl.load(sin + angles, mask=there, other=0.0), tl.load(sin + angles + HALF, mask=there, other=0.0)
    kind = first.dtype
    wide = tl.float64 if kind == tl.float64 else tl.float32
    first, second = first.to(wide), second.to(wide)
    cos_1, cos_2 = cos_1.to(wide)[None, :], cos_2.to(wide)[None, :]
    sin_1, sin_2 = sin_1.to(wide)[None, :], sin_2.to(wide)[None, :]
    straight_1, straight_2 = first * cos_1, second * cos_2
    if BACK:
        across_1, across_2 = second * sin_2, -first * sin_1
    else:
        across_1, across_2 = -second * sin_1, first * sin_2
    if ROUNDS:  # before the sum, as separate operations do
        straight_1, straight_2 = _rounded(straight_1, kind).to(wide), _rounded(straight_2, kind).to(wide)
        across_1, across_2 = _rounded(across_1, kind).to(wide), _rounded(across_2, kind).to(wide)
    tl.store(target + to_row + i[None, :] * t_d, _rounded(straight_1 + across_1, kind), mask=mask)
    tl.store(target + to_row + (i[None, :] + HALF) * t_d, _rounded(straight_2 + across_2, kind), mask=mask)

    if D > 2 * HALF:
        j = 2 * HALF + tl.arange(0, REST_2).to(tl.int64)
        rest = here & (j < D)[None, :]
        kept = tl.load(source + from_row + j[None, :] * s_d, mask=rest, other=0.0)
        tl.store(target + to_row + j[None, :] * t_d, kept, mask=rest)


def rotate(source: Tensor, target: Tensor, cos: Tensor, sin: Tensor, back: bool) -> None:
    """As ``rotate.rotate``; cos and sin contiguous."""
    s, b, p, n, d = source.shape
    r = cos.shape[-1]
    rows = p * n
    grid = (s * b, triton.cdiv(rows, ROWS))
    _rotate[grid](
        source, target, cos, sin,
        b, n, rows,
        *source.stride(), *target.stride(), cos.stride(0),
        HALF=r // 2, D=d, HALF_2=triton.next_power_of_2(r // 2), REST_2=triton.next_power_of_2(max(1, d - r)),
        ROWS=ROWS, BACK=back, ROUNDS=cos.dtype == source.dtype, enable_fp_fusion=False,
    )  # fmt: skip
