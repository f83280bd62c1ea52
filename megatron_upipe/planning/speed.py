"""How long a step takes, by a simple model: what is computed, and what of the traffic does not hide behind it.

Free of torch. The constants are those of H100 nodes; the two of attention and that of products are fitted on two
cells of the paper's throughput (``docs/planning.md``), the links are their makers' figures less what protocols cost.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_upipe.errors import UPipeError
from megatron_upipe.planning.states import GRADIENT, OPTIMIZER, PARAMETER

if TYPE_CHECKING:
    from megatron_upipe.planning.scenario import Scenario
    from megatron_upipe.planning.work import Work


@dataclass(frozen=True)
class Machine:
    """Of one GPU: TFLOP/s reached in bf16, GB/s each way over the links, microseconds that a collective takes without
    any bytes, GB/s of optimizer state that its share of the host's cores updates."""

    gemm_tflops: float = 450.0
    attention_forward_tflops: float = 690.0
    attention_backward_tflops: float = 590.0
    node_gb_s: float = 300.0
    network_gb_s: float = 45.0
    host_gb_s: float = 50.0
    collective_us: float = 60.0
    host_adam_gb_s: float = 20.0

    @classmethod
    def read(cls, path: str | None) -> Machine:
        """With the constants that the JSON file at ``path`` names, if any. Raises UPipeError."""
        if path is None:
            return cls()
        known = {field.name for field in fields(cls)}
        try:
            given = json.loads(Path(path).read_text(encoding="utf-8"))
            found = {name: float(value) for name, value in given.items()}
        except OSError as error:
            raise UPipeError(f"--constants {path} cannot be read: {error}") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise UPipeError(f"--constants {path} is not a JSON object of numbers: {error}") from error
        for name, value in found.items():
            if name not in known:
                raise UPipeError(f"--constants {path} has {name}, which is not one of {', '.join(sorted(known))}")
            if not value > 0:
                raise UPipeError(f"--constants {path} has {name} {value:g}; it has to be more than 0")
        return replace(cls(), **found)


@dataclass(frozen=True)
class Time:
    """Seconds of a step, by what they are spent on; ``tokens`` of the step on all of ``gpus``."""

    parts: dict[str, float]
    tokens: int
    gpus: int

    @property
    def step(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_gpu(self) -> float:
        """A second."""
        return self.tokens / self.gpus / self.step


def step_time(scenario: Scenario, work: Work, machine: Machine) -> Time:
    """Tensor parallelism and inputs fetched without ``--prefetch`` wait, and exchanges but those of inner stages with
    ``--overlap``; these and the ring hide behind attention, states and all other copies behind everything that is
    computed."""
    (p, r), tp, stages = scenario.sizes, scenario.tensor_parallel, scenario.pipeline_parallel

    def link(ranks: int) -> float:
        """Of groups of as many neighbouring ranks."""
        return machine.network_gb_s if scenario.ranks_of_node % ranks else machine.node_gb_s

    attention = work.attention_forward_flops / machine.attention_forward_tflops / 1e12
    attention += work.attention_backward_flops / machine.attention_backward_tflops / 1e12
    gemms = work.gemm_flops / machine.gemm_tflops / 1e12
    computed = attention + gemms
    inputs = 0.0
    if scenario.offload == "host" and scenario.prefetch == "off":
        inputs = scenario.stage_layers * 2 * scenario.local_tokens // tp * scenario.model.hidden
    exchange = work.sent.get("exchange", 0) / link(p * tp) / 1e9
    at_ends = exchange / len(scenario.schedule.stages) if scenario.overlap == "on" else exchange
    waited = at_ends + max(0.0, exchange - at_ends - attention)
    copies = max(work.copied.values(), default=0) - inputs
    parameters = scenario.model.parameters / (tp * stages)
    synced = {
        "ddp": 2 * GRADIENT,
        "distributed-optimizer": GRADIENT + PARAMETER,
        "megatron-fsdp": GRADIENT + 2 * PARAMETER,
    }[scenario.sharding]
    micro_batch = {
        "attention": attention,
        "products": gemms,
        "exchange": waited,
        "ring, not hidden": max(0.0, work.sent.get("ring", 0) / link(p * r * tp) / 1e9 - attention + exchange - waited),
        "tensor parallel": work.sent.get("tensor parallel", 0) / link(tp) / 1e9,
        "inputs fetched": inputs / machine.host_gb_s / 1e9,
        "host copies, not hidden": max(0.0, copies / machine.host_gb_s / 1e9 - computed),
        "starting collectives": sum(work.collectives.values()) * machine.collective_us / 1e6,
    }
    passes = 2 * stages - 1  # as many micro-batches as stages, and the bubble
    parts = {name: seconds * passes for name, seconds in micro_batch.items()}
    parts["states, not hidden"] = max(0.0, parameters * synced / link(scenario.gpus) / 1e9 - computed * passes)
    if scenario.optimizer_on_host:
        shards = 1 if scenario.sharding == "ddp" else scenario.context_parallel
        parts["optimizer on the host"] = parameters / shards * OPTIMIZER / machine.host_adam_gb_s / 1e9
    return Time({name: seconds for name, seconds in parts.items() if seconds}, scenario.tokens * stages, scenario.gpus)
