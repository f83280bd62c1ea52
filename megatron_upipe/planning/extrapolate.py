"""A step of any length from two short ones.

With tiles of one size everything grows along a line with the tokens of a rank, attention's FLOPs with the pairs of
tokens that see each other. Packed documents are as many as in the long step, of the same shares. The peak is the
largest of many lines: one for each chain of calls that makes tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from megatron_upipe.planning.documents import most_pairs, shrink
from megatron_upipe.planning.scenario import Scenario
from megatron_upipe.planning.simulate import Step, simulate_step

SHORT = 2, 3  # in units; a single tile would be another case
LONGEST_UNIT = 4  # of the larger tiles


def step_at(scenario: Scenario, layers: int) -> Step:
    """``simulate_step`` of the scenario; where that is long, from two short ones, without a timeline."""
    lengths = [tiles * unit_of(scenario) for tiles in SHORT]
    if scenario.local_tokens <= lengths[-1]:
        return _step(scenario.normalised(layers), layers)
    first, second = (_step(_shortened(scenario.normalised(layers), length), layers) for length in lengths)
    t = (scenario.local_tokens - lengths[0]) / (lengths[1] - lengths[0])
    short = _shortened(scenario.normalised(layers), lengths[1])
    return _line(first, second, t, most_pairs(scenario.segments) / most_pairs(short.segments))


def unit_of(scenario: Scenario) -> int:
    """Tokens of a rank in whole tiles of the MLP and the loss, and in even shards."""
    tiles = [max(tokens, 1) for tokens in (scenario.mlp_tile_tokens, scenario.loss_tile_tokens)]
    whole = math.lcm(*tiles, 2)
    if whole <= LONGEST_UNIT * max(tiles):
        return whole
    return -(-max(tiles) // 2) * 2  # sizes that do not suit each other: the count of the smaller tiles is a little off


def _shortened(scenario: Scenario, length: int) -> Scenario:
    tokens, documents = length * scenario.context_parallel, None
    if scenario.documents is not None:
        documents = tuple(shrink(scenario.lengths, tokens, 2 * scenario.context_parallel))
    return replace(scenario, tokens=tokens, documents=documents, rope=scenario.rotary)


@cache
def _step(scenario: Scenario, layers: int) -> Step:
    return simulate_step(scenario, layers)


def _line(a: Step, b: Step, t: float, pairs: float) -> Step:
    """The value at ``t`` of lines that are at ``a`` for 0 and at ``b`` for 1; ``pairs``: over those of ``b``."""

    def numbers(first: Mapping[Any, float], second: Mapping[Any, float]) -> dict[Any, int]:
        return {key: round(first.get(key, 0) + (second[key] - first.get(key, 0)) * t) for key in second}

    return replace(
        b,
        peaks=numbers(a.peaks, b.peaks),
        at_peaks={maker: numbers(a.at_peaks.get(maker, {}), owners) for maker, owners in b.at_peaks.items()},
        host=round(a.host + (b.host - a.host) * t),
        sent=numbers(a.sent, b.sent),
        copied=numbers(a.copied, b.copied),
        collectives=numbers(a.collectives, b.collectives),
        gemm_flops=numbers(a.gemm_flops, b.gemm_flops),
        attention_forward_flops=b.attention_forward_flops * pairs,
        attention_backward_flops=b.attention_backward_flops * pairs,
        timeline=(),
    )
