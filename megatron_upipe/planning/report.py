"""What a simulation says about a whole training step, for people and for machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_upipe.config import keeps_attention
from megatron_upipe.memory.host_need import chunk_bytes, waiting_bytes
from megatron_upipe.planning.authors import authors_bytes, authors_sent
from megatron_upipe.planning.scenario import AUTHORS, Scenario, tokens_text
from megatron_upipe.planning.simulate import LAYERS, SIMULATED_LAYERS, VOCABULARY, Step, simulate_step

GIB = 2**30


@dataclass(frozen=True)
class Report:
    """Of one method. ``parts`` are the device peak's bytes on a rank, ``alive`` those of the activations by owner,
    ``host`` bytes of all ranks of a node, ``sent`` what a rank sends in a step, by kind."""

    scenario: Scenario
    parts: dict[str, float]
    alive: dict[str, float]
    host: float
    sent: dict[str, float]
    attention_forward_runs: float
    attention_flops: float
    assumptions: tuple[str, ...]
    step: Step | None = None

    @property
    def device_peak(self) -> float:
        return sum(self.parts.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "device_peak_gib": _gib(self.device_peak),
            "host_gib_per_node": _gib(self.host),
            "attention_forward_runs": self.attention_forward_runs,
            "sent_gib": {kind: _gib(size) for kind, size in self.sent.items()},
            "collectives": self._collectives(),
            "attention_tflops": round(self.attention_flops / 1e12, 3),
            "parts_gib": {part: _gib(size) for part, size in self.parts.items()},
            "alive_at_peak_gib": {owner: _gib(size) for owner, size in self.alive.items()},
            "assumptions": list(self.assumptions),
        }

    def text(self) -> str:
        s, (p, r) = self.scenario, self.scenario.sizes
        tp = f" x TP {s.tensor_parallel}" if s.tensor_parallel > 1 else ""
        lines = [
            f"{s.model.name}, {tokens_text(s.tokens)} tokens on {s.gpus} GPUs, {s.method}: P {p} x R {r}{tp}, "
            f"U {s.schedule.heads_per_stage} (simulated)",
            f"  device peak of a rank {_gib(self.device_peak):29.2f} GiB",
        ]
        lines += [f"    {part:40}{_gib(size):8.2f}" for part, size in self.parts.items() if size]
        lines += [f"      {owner:38}{_gib(size):8.2f}" for owner, size in self.alive.items()]
        sent = ", ".join(f"{kind} {_gib(size):.1f}" for kind, size in self.sent.items())
        lines += [
            f"  host memory of a node {_gib(self.host):29.1f} GiB",
            f"  sent by a rank in a step, GiB: {sent or 'nothing'}",
            f"  attention runs forward {self.attention_forward_runs:.2f} times in a layer",
        ]
        return "\n".join(lines)

    def _collectives(self) -> dict[str, int]:
        """Of a step, with all layers."""
        if self.step is None:
            return {}
        return {k: n * self.scenario.model.layers // self.step.layers for k, n in self.step.collectives.items()}


def report(scenario: Scenario) -> Report:
    """Simulates a step of ``scenario``. Raises UPipeError where it is not possible."""
    scenario.check()
    return _authors(scenario) if scenario.method == AUTHORS else _simulated(scenario)


def _simulated(scenario: Scenario) -> Report:
    model, states = scenario.model, scenario.states
    layers = min(SIMULATED_LAYERS, model.layers)
    step = simulate_step(scenario, layers)
    all_waiting, simulated = (_waiting(scenario, count) for count in (model.layers, layers))
    on_host = scenario.offload == "host"
    more = 0 if on_host else all_waiting - simulated
    unsharded = {LAYERS: states.unsharded_layer, VOCABULARY: states.unsharded_vocabulary}
    phase = max(step.peaks, key=lambda phase: step.peaks[phase] + unsharded[phase])
    rows = sorted(step.at_peak[phase].items(), key=lambda row: -row[1])
    alive = {"waiting in further layers": more} if more else {}
    alive |= {owner: size for owner, size in rows if size > step.peaks[phase] // 1000}
    kept = model.layers if scenario.keep_attention is None else scenario.keep_attention
    share = model.layers / layers
    return Report(
        scenario=scenario,
        parts={
            "parameters": states.parameters,
            "gradients": states.gradients,
            "optimizer": states.optimizer,
            f"unsharded ({phase})": unsharded[phase],
            "activations": step.peaks[phase] + more,
        },
        alive=alive,
        host=scenario.ranks_of_node * ((all_waiting if on_host else 0) + states.host),
        sent={kind: size * share for kind, size in step.sent.items()},
        attention_forward_runs=1 + (model.layers - kept) / model.layers,
        attention_flops=step.attention_flops * share,
        assumptions=(
            "simulated: rank 0's real layers on tensors without data, one micro-batch; no GPU was used",
            f"attention allocates as {scenario.attention_backend} does, workspace included, norms as fused kernels do",
            f"bf16 parameters, fp32 gradients and Adam, {scenario.sharding}; FSDP gathers one layer and the next",
            f"{layers} layers are run; the others add what waits for their backward",
            "not counted: CUDA context, NCCL buffers, fragmentation",
        ),
        step=step,
    )


def _authors(scenario: Scenario) -> Report:
    model = scenario.model
    parts = authors_bytes(scenario)
    inputs = (model.layers - 1) * 2 * scenario.local_tokens * model.hidden
    tokens, heads = scenario.tokens, model.heads
    flops = (2 * 2 + 5) * tokens * tokens * heads * model.head_dim * model.layers / scenario.context_parallel
    return Report(
        scenario=scenario,
        parts=parts,
        alive={},
        host=scenario.ranks_of_node * inputs,
        sent=authors_sent(scenario),
        attention_forward_runs=2.0,
        attention_flops=flops,
        assumptions=(
            "the paper's code by a list of the tensors that it holds, with one constant fitted on a published peak",
            "16 bytes a parameter, fully sharded; inputs of all layers but the first wait on the host",
        ),
    )


def _waiting(scenario: Scenario, layers: int) -> int:
    """Bytes that wait for backward on a rank when ``layers`` layers have run forward."""
    model, tp = scenario.model, scenario.tensor_parallel
    one = waiting_bytes(
        tokens=scenario.local_tokens,
        micro_batch=1,
        hidden=model.hidden,
        heads=model.heads // tp,
        head_dim=model.head_dim,
        shards=tp,
        itemsize=2,
    )
    keeps = [keeps_attention(scenario.kept(layers), layers, 0, layers, index) for index in range(layers)]
    return sum(chunk_bytes(one, keeps, scenario.checkpoint_every))


def _gib(size: float) -> float:
    return round(size / GIB, 3)
