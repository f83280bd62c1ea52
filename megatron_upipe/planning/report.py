"""What a simulation says about a whole training step, for people and for machines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron_upipe.config import keeps_attention
from megatron_upipe.memory.host_need import chunk_bytes, store_bytes, waiting_bytes
from megatron_upipe.planning.authors import authors_bytes, authors_work
from megatron_upipe.planning.extrapolate import step_at
from megatron_upipe.planning.scenario import AUTHORS, Scenario, tokens_text
from megatron_upipe.planning.simulate import LAYERS, SIMULATED_LAYERS, VOCABULARY, Step, simulate_step
from megatron_upipe.planning.states import gib
from megatron_upipe.planning.work import Work, work_of


@dataclass(frozen=True)
class Report:
    """Of one method. ``parts`` are the device peak's bytes on a rank, ``alive`` those of the activations by owner,
    ``host`` bytes of all ranks of a node."""

    scenario: Scenario
    parts: dict[str, float]
    alive: dict[str, float]
    host: float
    assumptions: tuple[str, ...]
    step: Step | None = None

    @cached_property
    def work(self) -> Work:
        """What a rank does in a step; may take further short simulations, which whether it fits does not."""
        return authors_work(self.scenario) if self.step is None else work_of(self.scenario, self.step)

    @property
    def device_peak(self) -> float:
        return sum(self.parts.values())

    def fits(self, device: float, host: float) -> bool:
        """In ``device`` bytes of a GPU and ``host`` bytes of a node."""
        return self.device_peak <= device and self.host <= host

    def as_json(self) -> dict[str, Any]:
        work = self.work
        return {
            "device_peak_gib": gib(self.device_peak),
            "host_gib_per_node": gib(self.host),
            "attention_forward_runs": work.attention_forward_runs,
            "sent_gib": {kind: gib(size) for kind, size in work.sent.items()},
            "copied_gib": {direction: gib(size) for direction, size in work.copied.items()},
            "collectives": work.collectives,
            "attention_tflops": round(work.attention_flops / 1e12, 3),
            "gemm_tflops": round(work.gemm_flops / 1e12, 3),
            "parts_gib": {part: gib(size) for part, size in self.parts.items()},
            "alive_at_peak_gib": {owner: gib(size) for owner, size in self.alive.items()},
            "assumptions": list(self.assumptions),
        }

    def text(self) -> str:
        s, (p, r), work = self.scenario, self.scenario.sizes, self.work
        tp = f" x TP {s.tensor_parallel}" if s.tensor_parallel > 1 else ""
        pp = f" x PP {s.pipeline_parallel}" if s.pipeline_parallel > 1 else ""
        lines = [
            f"{s.model.name}, {tokens_text(s.tokens)} tokens on {s.gpus} GPUs, {s.method}: P {p} x R {r}{tp}{pp}, "
            f"U {s.schedule.heads_per_stage}{_packed(s)} (simulated)",
            f"  device peak of a rank {gib(self.device_peak):45.2f} GiB",
        ]
        lines += [f"    {part:56}{gib(size):8.2f}" for part, size in self.parts.items() if size]
        lines += [f"      {owner:54}{gib(size):8.2f}" for owner, size in self.alive.items()]
        sent = ", ".join(f"{kind} {gib(size):.1f}" for kind, size in work.sent.items())
        copied = ", ".join(f"{direction} {gib(size):.1f}" for direction, size in work.copied.items())
        lines += [
            f"  host memory of a node {gib(self.host):45.1f} GiB",
            f"  sent by a rank in a step, GiB: {sent or 'nothing'}; copied: {copied or 'nothing'}",
            f"  PFLOPs of a rank: attention {work.attention_flops / 1e15:.2f}, other products "
            f"{work.gemm_flops / 1e15:.2f}; attention runs forward {work.attention_forward_runs:.2f} times in a layer",
        ]
        return "\n".join(lines)


def report(scenario: Scenario, whole: bool = False) -> Report:
    """Simulates a step of ``scenario``; ``whole``: all its tiles, with a timeline, instead of two short steps.

    Raises UPipeError where it is not possible.
    """
    scenario.check()
    return _authors(scenario) if scenario.method == AUTHORS else _simulated(scenario, whole)


def _simulated(scenario: Scenario, whole: bool) -> Report:
    model, states, stages = scenario.model, scenario.states, scenario.pipeline_parallel
    layers = min(SIMULATED_LAYERS, scenario.stage_layers)
    step = (simulate_step if whole else step_at)(scenario, layers)
    first, last, simulated = (
        _waiting(scenario, model.layers, stages),
        *(_waiting(scenario, count, 1) for count in (model.layers, layers)),
    )
    on_host = scenario.offload == "host"
    unsharded = {LAYERS: states.unsharded_layer, VOCABULARY: states.unsharded_vocabulary}
    more = {LAYERS: first - simulated, VOCABULARY: last - simulated} if not on_host else {LAYERS: 0, VOCABULARY: 0}
    maker = max(step.peaks, key=lambda maker: step.peaks[maker] + unsharded[maker[0]] + more[maker[0]])
    phase, peak = maker[0], step.peaks[maker]
    alive = {"waiting in further layers": more[phase]} if more[phase] else {}
    rows = sorted(step.at_peaks[maker].items(), key=lambda row: -row[1])
    alive |= {owner: size for owner, size in rows if size > peak // 1000}
    run = "all their tiles" if whole else "two short lengths, what grows with the tokens is extrapolated"
    assumptions = [
        f"simulated: the last rank's real layers on tensors without data, {run}; no GPU was used",
        f"attention allocates as {scenario.attention_backend} does, workspace included, norms as fused kernels do",
        f"bf16 parameters, fp32 gradients and Adam, {scenario.sharding}; FSDP without prefetch "
        "(--suggested-communication-unit-size 1)",
        f"{layers} layers are run; the others add what waits for their backward",
        "not counted: CUDA context, NCCL buffers, fragmentation",
    ]
    if scenario.documents is not None:
        assumptions.append(
            "packed documents: every rank holds as many tokens; memory is that of the last or first ring rank, if that "
            "needs more, attention that of the rank with the most of it"
        )
    if stages > 1:
        assumptions.append(f"{stages} micro-batches, all in flight in the first stage, which decides")
    if model.experts:
        assumptions.append("experts: a stand-in that routes all tokens evenly and holds them all at once")
    return Report(
        scenario=scenario,
        parts={
            "parameters": states.parameters,
            "gradients": states.gradients,
            "optimizer": states.optimizer,
            f"unsharded ({phase})": unsharded[phase],
            "activations": peak + more[phase],
        },
        alive=alive,
        host=host_bytes(scenario),
        assumptions=tuple(assumptions),
        step=step,
    )


def _packed(scenario: Scenario) -> str:
    lengths = scenario.lengths
    if lengths is None:
        return ""
    return f", {len(lengths)} documents of up to {tokens_text(max(lengths))}"


def host_bytes(scenario: Scenario) -> int:
    """Host memory of a node; without a simulation."""
    waits = _waiting(scenario, scenario.model.layers, scenario.pipeline_parallel) if scenario.offload == "host" else 0
    return scenario.ranks_of_node * (waits + scenario.states.host)


def most_kept(scenario: Scenario, host: float) -> int | None:
    """Layers that can keep their attention in ``host`` bytes of a node; None: not even none of them."""
    layers = range(scenario.model.layers, -1, -1)
    return next((kept for kept in layers if host_bytes(replace(scenario, keep_attention=kept)) <= host), None)


def least_device_bytes(scenario: Scenario) -> int:
    """Less than the device peak: states, and what waits there; without a simulation."""
    on_device = scenario.offload == "none"
    waits = _waiting(scenario, scenario.model.layers, scenario.pipeline_parallel) if on_device else 0
    return scenario.states.sharded + waits


def _authors(scenario: Scenario) -> Report:
    model = scenario.model
    return Report(
        scenario=scenario,
        parts=authors_bytes(scenario),
        alive={},
        host=scenario.ranks_of_node * (model.layers - 1) * 2 * scenario.local_tokens * model.hidden,
        assumptions=(
            "the paper's code by a list of the tensors that it holds, with one constant fitted on a published peak",
            "16 bytes a parameter, fully sharded; inputs of all layers but the first wait on the host",
        ),
    )


def _waiting(scenario: Scenario, layers: int, in_flight: int) -> int:
    """Bytes that wait for backward on a rank of the first pipeline stage of a model of ``layers`` layers."""
    model, tp, stages = scenario.model, scenario.tensor_parallel, scenario.pipeline_parallel
    one = waiting_bytes(
        tokens=scenario.local_tokens,
        micro_batch=1,
        hidden=model.hidden,
        heads=model.heads // tp,
        head_dim=model.head_dim,
        shards=tp,
        itemsize=2,
    )
    here = layers // stages if layers == model.layers else layers
    kept = scenario.kept(layers)
    keeps = [keeps_attention(kept, layers, 0, here, index) for index in range(here)]
    return store_bytes([chunk_bytes(one, keeps, scenario.checkpoint_every)], [0] * in_flight, in_flight - 1)
