"""What a rank does in one training step: products, attention, bytes sent and copied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_upipe.planning.extrapolate import step_at
from megatron_upipe.planning.scenario import Scenario
from megatron_upipe.planning.simulate import LAYERS, SIMULATED_LAYERS, VOCABULARY, Step


@dataclass(frozen=True)
class Work:
    """Of a rank and one micro-batch, recomputation included: FLOPs (attention's half under the causal mask), bytes
    ``sent`` by kind and ``copied`` "to host" and "to device", ``collectives`` by kind, and how often attention runs
    forward in a layer on average."""

    gemm_flops: float
    attention_forward_flops: float
    attention_backward_flops: float
    sent: Mapping[str, float]
    copied: Mapping[str, float]
    collectives: Mapping[str, int]
    attention_forward_runs: float

    @property
    def attention_flops(self) -> float:
        return self.attention_forward_flops + self.attention_backward_flops


def work_of(scenario: Scenario, step: Step) -> Work:
    """Of all layers of a pipeline stage, from ``step`` of some of them.

    Where only some layers keep attention, or every third or fewer their input, from short steps in which all or none
    do and every first or second does.
    """
    layers, every = scenario.stage_layers, scenario.checkpoint_every
    kept = scenario.kept(layers)
    kept = layers if kept is None else kept
    runs = (2 * layers - kept) / layers
    if kept in (0, layers) and every <= SIMULATED_LAYERS:
        return _sum([(step, layers)], runs)
    made_again = 2 * (every - 1) / every  # in the simulated pair one of two second halves runs again
    steps = []
    for keep, of_keep in ((None, kept), (0, layers - kept)):
        for pairs, of_pairs in ((1, 1 - made_again), (2, made_again)):
            if of_keep * of_pairs:
                one = replace(scenario, keep_attention=keep, checkpoint_every=pairs)
                steps.append((step_at(one, min(SIMULATED_LAYERS, layers)), of_keep * of_pairs))
    return _sum(steps, runs)


def _sum(steps: list[tuple[Step, float]], runs: float) -> Work:
    """Of steps, each counted for a number of layers; embedding and loss once."""
    sent, copied, collectives = Counter(), Counter(), Counter()
    gemm = forward = backward = 0.0
    for step, layers in steps:
        share = layers / step.layers
        for total, part in ((sent, step.sent), (copied, step.copied), (collectives, step.collectives)):
            total.update({kind: value * share for kind, value in part.items()})
        gemm += step.gemm_flops[LAYERS] * share
        forward += step.attention_forward_flops * share
        backward += step.attention_backward_flops * share
    gemm += steps[0][0].gemm_flops[VOCABULARY]
    rounded = [{kind: round(value) for kind, value in total.items()} for total in (sent, copied, collectives)]
    return Work(gemm, forward, backward, *rounded, runs)
