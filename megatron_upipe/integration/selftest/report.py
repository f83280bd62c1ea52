"""The selftest on one rank of an initialised world: trials, plans, bandwidth, table."""

from __future__ import annotations

import io
import math
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_upipe.context.groups import context_groups
from megatron_upipe.errors import UPipeError
from megatron_upipe.integration.selftest import bandwidth, layers, packed, parity
from megatron_upipe.integration.selftest.shapes import Trial
from megatron_upipe.integration.versions import megatron_core_version

NOTHING = (float("nan"), float("nan"))


@dataclass
class Row:
    """One trial's result: (error, allowed), the largest errors over all ranks; dW of the weight nearest its limit."""

    name: str
    output: tuple[float, float] = NOTHING
    dx: tuple[float, float] = NOTHING
    dw: tuple[float, float] = NOTHING
    good: bool = False
    problem: str = ""


@dataclass
class Report:
    """The same on all ranks."""

    world: int
    device: str
    rows: list[Row] = field(default_factory=list)
    bandwidth: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return bool(self.rows) and all(row.good for row in self.rows)

    def json(self) -> dict:
        return {**asdict(self), "good": self.good}

    def table(self) -> str:
        width = max(32, *(len(row.name) + 1 for row in self.rows)) if self.rows else 32
        lines = [f"{'relative error / allowed':{width}}{'output':>18}{'dx':>18}{'dW':>18}  verdict"]
        for row in self.rows:
            pairs = (f"{error:.1e} / {allowed:.0e}" for error, allowed in (row.output, row.dx, row.dw))
            numbers = "".join(f"{pair:>18}" for pair in pairs)
            lines.append(f"{row.name:{width}}{numbers}  {'ok' if row.good else 'FAILED ' + row.problem}")
        for name, speeds in self.bandwidth.items():
            slowest = ", ".join(f"{kind} {speed:.2f} GB/s" for kind, speed in speeds.items())
            lines.append(f"{name:{width}}{slowest} (slowest rank)")
        lines.append(f"{sum(row.good for row in self.rows)} of {len(self.rows)} passed on {self.world} x {self.device}")
        return "\n".join(lines)


def run(trials: list[Trial], heads: int, kv_heads: int, head_dim: int, mebibytes: int, progress: bool) -> Report:
    """All trials, one after the other; collective over the world, which must have been initialised without groups."""
    _check_same_plan(trials, heads, kv_heads, head_dim)
    alone = parity.groups_of_one()
    report = Report(dist.get_world_size(), parity.device().type)
    for index, trial in enumerate(trials, start=1):
        if progress and dist.get_rank() == 0:
            print(f"\r{index} of {len(trials)}: {trial.name():40}", end="", file=sys.stderr, flush=True)
        parity.initialize(trial.p, trial.r, trial.tp)
        with redirect_stdout(io.StringIO()):  # the table says what the modules' plan lines would
            report.rows.append(_try(trial, heads, kv_heads, head_dim, alone))
        layout = f"P {trial.p} x R {trial.r}"
        if trial.tp == 1 and layout not in report.bandwidth:
            groups = context_groups(
                parallel_state.get_context_parallel_group(),
                parallel_state.get_hierarchical_context_parallel_groups(),
                [trial.p, trial.r],
            )
            speeds = _gather(bandwidth.measure(groups, parity.device(), mebibytes))
            report.bandwidth[layout] = {kind: min(speed[kind] for speed in speeds) for kind in speeds[0]}
        parallel_state.destroy_model_parallel()
    if progress and dist.get_rank() == 0:
        print("\r" + " " * 60, end="\r", file=sys.stderr)
    return report


def _try(trial: Trial, heads: int, kv_heads: int, head_dim: int, alone: dist.ProcessGroup) -> Row:
    """One trial; its verdict is the same on all ranks. Collective."""
    case = parity.Case(
        heads=heads,
        kv_heads=kv_heads,
        heads_per_stage=trial.heads_per_stage,
        head_dim=head_dim,
        hidden=64,
        micro_batch=2,
        chunk=4 * trial.tp,
        # the few gradients of a norm are sums that cancel: their bf16 error on so few tokens is chance
        config=dict(qk_layernorm=trial.precision == "fp64", add_qkv_bias=True),
    )
    groups = parity.single_rank_groups(alone)
    row = Row(trial.name())
    if trial.layer:
        errors = layers.compare_layers(case, trial.p, trial.r, groups, trial.tp, trial.sequence_parallel)
        found = {name: (error, parity.TOLERANCE) for name, error in errors.items()}
    elif trial.packed:
        sizes = trial.p, trial.r, groups, trial.tp, trial.sequence_parallel
        errors = packed.compare_packed(*_packing(case, trial), *sizes)
        found = {name: (error, parity.TOLERANCE) for name, error in errors.items()}
    elif trial.precision == "bf16":
        pairs = parity.compare_low_precision(case, trial.p, trial.r, groups)
        found = {name: (ours, 2 * stock) for name, (ours, stock) in pairs.items()}
    else:
        errors = parity.compare(case, trial.p, trial.r, groups, trial.tp, trial.sequence_parallel)
        found = {name: (error, parity.TOLERANCE) for name, error in errors.items()}
    # each rank is judged by its own limit; NaN counts as infinite
    found = {name: (math.inf if math.isnan(error) else error, allowed) for name, (error, allowed) in found.items()}
    everyone = _gather(found)
    worst = {name: max((other[name] for other in everyone), key=_of_limit) for name in found}
    row.output, row.dx = worst["output"], worst["dx"]
    row.dw = max((pair for name, pair in worst.items() if name not in ("output", "dx")), key=_of_limit)
    bad = [name for name, pair in worst.items() if not _of_limit(pair) <= 1]
    row.good, row.problem = not bad, ", ".join(bad)
    return row


def _packing(case: parity.Case, trial: Trial) -> tuple[parity.Case, packed.Packing]:
    """Documents shorter than a shard and longer, padded as ``--sft`` does it; a window of some tokens and sinks."""
    unit = 2 * trial.p * trial.r * trial.tp
    lengths, places = (unit - 1, 1, 2 * unit + 3), (unit, unit, 3 * unit)
    config = {**case.config, "window_size": (unit, 0), "softmax_type": "learnable"}
    packing = packed.Packing(lengths, places, sum(places), "document")
    return replace(case, micro_batch=1, config=config), packing


def _of_limit(pair: tuple[float, float]) -> float:
    return pair[0] / pair[1]


def _gather(mine: Any) -> list:
    """Every rank's object. Collective over the world."""
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _check_same_plan(trials: list[Trial], heads: int, kv_heads: int, head_dim: int) -> None:
    """Raises UPipeError unless all ranks would do the same work with the same software. Collective over the world."""
    mine = (trials, heads, kv_heads, head_dim, torch.__version__, str(megatron_core_version()), parity.device().type)
    for rank, theirs in enumerate(_gather(mine)):
        if theirs != mine:
            different = next(b for a, b in zip(mine, theirs, strict=True) if a != b)
            raise UPipeError(f"rank {rank} plans other work than rank {dist.get_rank()}: {str(different)[:200]}")


def initialize_world(device_type: str) -> None:
    """The default process group from torchrun's environment, and each rank's GPU. Collective."""
    import os

    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
