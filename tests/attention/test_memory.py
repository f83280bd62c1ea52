"""Measured peaks: memory falls with the heads per stage, as it must if UPipe does anything."""

import torch
from prompt_exchange import prompt_exchanges

from megatron_upipe.integration.selftest.parity import (
    Case,
    initialize,
    single_rank_groups,
    stock_attention,
    upipe_attention,
)
from megatron_upipe.planning.live_bytes import LiveBytes


def _peak(rank, heads_per_stage):
    """(peak in u1 of forward and backward without weight gradients, u1)."""
    initialize(4, 1)
    case = Case(heads=16, kv_heads=4, heads_per_stage=heads_per_stage, micro_batch=1, chunk=256, head_dim=8, hidden=128)
    module = upipe_attention(case, 4, 1, stock_attention(case, single_rank_groups()))
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    x = torch.randn(2 * case.chunk, 1, case.hidden, dtype=torch.float64, requires_grad=True)
    u1 = x.numel() // case.hidden * case.heads * case.head_dim * x.itemsize
    with prompt_exchanges(), LiveBytes() as live:
        live.count(x)
        module(x, None)[0].mul(1.0).sum().backward()
    return live.peak / u1


def test_peak_falls_with_heads_per_stage(workers):
    peaks = [workers.run(4, _peak, u)[0] for u in (16, 8, 4)]
    assert peaks[0] > peaks[1] > peaks[2]
    # x, out, dy, dx are full size, the rest quarters: q, out, dout, dq; and k, v with two sets of their gradients
    assert 4 < peaks[2] < 4 + 11 / 4, peaks
    # those four are what grows with U (keys and values belong to a block); out is the stand-in that its delta gave
    assert 2.5 < peaks[0] - peaks[2] <= 3, peaks
