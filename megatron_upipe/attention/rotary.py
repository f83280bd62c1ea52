"""Exact RoPE angles: fp64, reduced modulo 2 pi, for the local tokens only.

Megatron multiplies fp32 positions by fp32 frequencies; at 8M tokens the product is off by up to 0.25 rad. The angles
made here replace that table in Megatron's own ``apply_rotary_pos_emb``.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from megatron_upipe.config import RotarySettings
from megatron_upipe.context.packing import positions_in_documents
from megatron_upipe.context.segments import Segments
from megatron_upipe.errors import UPipeError

# Llama 3's frequency scaling (Meta, Llama 3.1 model card): factors and the context length it was trained at.
LOW_FREQUENCY_FACTOR, HIGH_FREQUENCY_FACTOR, ORIGINAL_LENGTH = 1.0, 4.0, 8192


def inverse_frequencies(settings: RotarySettings, head_dim: int) -> Tensor:
    """fp64 [rotary_dim / 2]: radians per token."""
    dim = int(head_dim * settings.percent)
    frequencies = settings.base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    factor = settings.llama3_scaling_factor
    if factor is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    smooth = (ORIGINAL_LENGTH / wavelengths - LOW_FREQUENCY_FACTOR) / (HIGH_FREQUENCY_FACTOR - LOW_FREQUENCY_FACTOR)
    smooth = smooth.clamp(0, 1)  # 0: low frequencies, divided by the factor; 1: high ones, unchanged
    return smooth * frequencies + (1 - smooth) * frequencies / factor


@torch.inference_mode(False)  # evaluation may make what training uses next
def angles_of_documents(table: Tensor, segments: Segments, rank: int) -> Tensor:
    """Megatron's angles [s, 1, 1, rotary_dim] of context-parallel rank ``rank``, from its ``table`` of a document's.

    Padding behind the table has the table's last angle. Kept with the segments and shared: not to be written to. Raises
    UPipeError where a document is longer than the table.
    """

    def make() -> Tensor:
        longest = max((stop - start for start, stop in segments.documents), default=0)
        if longest > table.shape[0]:
            raise UPipeError(
                f"packed_seq_params.max_seqlen_q {table.shape[0]} is less than the longest document, of {longest} "
                "tokens; give its length"
            )
        positions = positions_in_documents(segments, rank, table.device)
        return table[positions.clamp(max=table.shape[0] - 1)]

    # the key holds the table, so that no other can come to have its address
    return segments.remembered(("angles", id(table), rank), lambda: (table, make()))[1]


@torch.inference_mode(False)
def exact_angles(
    segments: Segments,
    rank: int,
    settings: RotarySettings,
    head_dim: int,
    interleaved: bool,
    device: torch.device,
) -> Tensor:
    """fp32 angles [s, 1, 1, rotary_dim] of context-parallel rank ``rank``, in Megatron's arrangement of pairs.

    Kept with the segments and shared: not to be written to.
    """
    how = settings, head_dim, interleaved
    key = "exact angles", rank, *how, device
    return segments.remembered(key, lambda: _exact(positions_in_documents(segments, rank, device), *how))


@lru_cache(maxsize=2)
@torch.inference_mode(False)
def exact_table(
    length: int, settings: RotarySettings, head_dim: int, interleaved: bool, device: torch.device
) -> Tensor:
    """The same of positions 0 to ``length`` - 1: what Megatron's own attention takes. Shared: not to be written to."""
    return _exact(torch.arange(length, device=device), settings, head_dim, interleaved)


def _exact(positions: Tensor, settings: RotarySettings, head_dim: int, interleaved: bool) -> Tensor:
    positions = positions.to(torch.float64)
    if settings.interpolation_factor is not None:
        positions = positions / settings.interpolation_factor
    angles = torch.outer(positions, inverse_frequencies(settings, head_dim).to(positions.device))
    angles = torch.remainder(angles, 2 * math.pi).float()
    angles = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)
    return angles[:, None, None, :]
