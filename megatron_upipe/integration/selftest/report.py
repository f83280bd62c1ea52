"""The selftest on one rank of an initialised world: trials, plans, bandwidth, table."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_upipe.context.groups import context_groups
from megatron_upipe.integration.selftest import bandwidth, parity
from megatron_upipe.integration.selftest.shapes import Trial

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
        lines = [f"{'relative error / allowed':32}{'output':>18}{'dx':>18}{'dW':>18}  verdict"]
        for row in self.rows:
            pairs = (f"{error:.1e} / {allowed:.0e}" for error, allowed in (row.output, row.dx, row.dw))
            numbers = "".join(f"{pair:>18}" for pair in pairs)
            lines.append(f"{row.name:32}{numbers}  {'ok' if row.good else 'FAILED ' + row.problem}")
        for name, speeds in self.bandwidth.items():
            lines.append(f"{name:32}" + ", ".join(f"{kind} {speed:.2f} GB/s" for kind, speed in speeds.items()))
        lines.append(f"{sum(row.good for row in self.rows)} of {len(self.rows)} passed on {self.world} x {self.device}")
        return "\n".join(lines)


def run(trials: list[Trial], heads: int, kv_heads: int, head_dim: int, mebibytes: int, progress: bool) -> Report:
    """All trials, one after the other; collective over the world, which must have been initialised without groups."""
    report = Report(dist.get_world_size(), parity.device().type)
    for index, trial in enumerate(trials, start=1):
        if progress and dist.get_rank() == 0:
            print(f"\r{index} of {len(trials)}: {trial.name():40}", end="", file=sys.stderr, flush=True)
        parity.initialize(trial.p, trial.r, trial.tp)
        with redirect_stdout(io.StringIO()):  # the table says what the modules' plan lines would
            report.rows.append(_try(trial, heads, kv_heads, head_dim))
        layout = f"P {trial.p} x R {trial.r}"
        if trial.tp == 1 and layout not in report.bandwidth:
            groups = context_groups(
                parallel_state.get_context_parallel_group(),
                parallel_state.get_hierarchical_context_parallel_groups(),
                [trial.p, trial.r],
            )
            report.bandwidth[layout] = bandwidth.measure(groups, parity.device(), mebibytes)
        parallel_state.destroy_model_parallel()
    if progress and dist.get_rank() == 0:
        print("\r" + " " * 60, end="\r", file=sys.stderr)
    return report


def _try(trial: Trial, heads: int, kv_heads: int, head_dim: int) -> Row:
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
    groups = parity.single_rank_groups()
    row = Row(trial.name())
    if trial.precision == "bf16":
        pairs = parity.compare_low_precision(case, trial.p, trial.r, groups)
        found = {name: (ours, 2 * stock) for name, (ours, stock) in pairs.items()}
    else:
        errors = parity.compare(case, trial.p, trial.r, groups, trial.tp, trial.sequence_parallel)
        found = {name: (error, parity.TOLERANCE) for name, error in errors.items()}
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (found, case, trial))
    if any(other[1:] != everyone[0][1:] for other in everyone):
        row.problem = "the ranks planned different work"
        return row
    worst = {name: max((other[0][name] for other in everyone), key=lambda pair: pair[0]) for name in found}
    weights = [pair for name, pair in worst.items() if name not in ("output", "dx")]
    row.output, row.dx = worst["output"], worst["dx"]
    row.dw = max(weights, key=lambda pair: pair[0] / pair[1])
    bad = [name for name, (error, allowed) in worst.items() if not error <= allowed]
    row.good, row.problem = not bad, ", ".join(bad)
    return row


def initialize_world(device_type: str) -> None:
    """The default process group from torchrun's environment, and each rank's GPU. Collective."""
    import os

    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
