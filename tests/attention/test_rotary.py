"""Exact RoPE angles: token i's angle is i's, on every rank, at any length."""

import math

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron_upipe.attention.rotary import exact_angles, inverse_frequencies
from megatron_upipe.config import RotarySettings
from megatron_upipe.context.layout import SequenceLayout
from megatron_upipe.context.segments import one_document
from megatron_upipe.integration import cpu

CPU = torch.device("cpu")


def stock_table(length, **changes):
    cpu.install()
    try:
        rotary = RotaryEmbedding(
            **{"kv_channels": 16, "rotary_percent": 1.0, "use_cpu_initialization": True, **changes}
        )
        return rotary.get_emb(length)
    finally:
        cpu.uninstall()


@pytest.mark.parametrize(
    ("settings", "stock", "interleaved"),
    [
        (RotarySettings(), {}, False),
        (RotarySettings(), dict(rotary_interleaved=True), True),
        (RotarySettings(base=500000.0), dict(rotary_base=500000), False),
        (RotarySettings(percent=0.5), dict(rotary_percent=0.5), False),
        (RotarySettings(llama3_scaling_factor=8.0), dict(rope_scaling=True, rope_scaling_factor=8.0), False),
        (RotarySettings(interpolation_factor=4.0), dict(seq_len_interpolation_factor=4.0), False),
    ],
)
def test_equals_stock_at_short_lengths(settings, stock, interleaved):
    layout, length = SequenceLayout(2, 3), 48
    table = stock_table(length, **stock)
    for rank in range(layout.size):
        positions = [i for half in layout.positions(rank, length) for i in half]
        angles = exact_angles(one_document(layout, length), rank, settings, 16, interleaved, CPU)
        assert angles.shape == (8, 1, 1, int(16 * settings.percent)) and angles.dtype == torch.float32
        # angles are equal modulo 2 pi
        torch.testing.assert_close(torch.cos(angles), torch.cos(table[positions]), rtol=0, atol=2e-5)
        torch.testing.assert_close(torch.sin(angles), torch.sin(table[positions]), rtol=0, atol=2e-5)


def test_stays_exact_at_8m_where_stock_does_not():
    layout, length = SequenceLayout(8, 2), 2**23
    settings = RotarySettings(base=500000.0)
    rank = 0  # holds the last chunk
    angles = exact_angles(one_document(layout, 2**12), rank, settings, 64, False, CPU)
    assert angles.shape[0] == 2**12 // 16
    position = length - 1
    frequencies = 500000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    # whole turns are taken off by exact integer arithmetic on a fine grid of the frequency
    wanted = torch.tensor([math.fmod(position * f, 2 * math.pi) for f in frequencies.tolist()], dtype=torch.float64)
    exact = torch.remainder(position * inverse_frequencies(settings, 64), 2 * math.pi).float()
    stock = torch.tensor(float(position)) * frequencies.float()
    assert (torch.cos(exact).double() - torch.cos(wanted)).abs().max() < 1e-6
    assert (torch.cos(stock).double() - torch.cos(wanted)).abs().max() > 1e-2
