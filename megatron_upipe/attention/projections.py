"""Projections of a stage from this rank's tokens, and a block's keys and values for each rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron_upipe.attention.gradients import flat
from megatron_upipe.attention.heads import key_value_rows, query_heads, query_rows
from megatron_upipe.attention.input import AttentionInput
from megatron_upipe.attention.plan import AttentionPlan, AttentionWeights
from megatron_upipe.attention.schedule import Stage

GATE = 1  # which part of linear_qkv's query rows the output gates are


def gated_output(out: Tensor, gate: Tensor) -> Tensor:
    """Megatron's output gate: the sigmoid is taken in fp32."""
    return (out * torch.sigmoid(gate.float())).to(out.dtype)


def gate_output(x: AttentionInput, out: Tensor, weights: AttentionWeights, plan: AttentionPlan) -> Tensor:
    """The input of the output projection [t, b, H*d]: ``out`` itself, or with output gates a gated copy of it."""
    if not plan.output_gate:
        return out
    gated = torch.empty_like(out)
    heads = [t.unflatten(2, (plan.schedule.query_heads, plan.head_dim)) for t in (gated, out)]
    for stage in plan.schedule.stages:
        target, source = (query_heads(t, plan.schedule, stage, axis=2) for t in heads)
        gate = project_queries(x, weights, stage, plan, part=GATE)
        target.copy_(gated_output(source, gate.view(source.shape)))
    return gated


def project_output(out: Tensor, weights: AttentionWeights, plan: AttentionPlan) -> Tensor:
    """The output projection [t, b, H*d] -> [t, b, hidden], without its bias and its sum over tensor parallelism."""
    x = plan.precision.tokens(flat(out), forward=True, backward=False)
    return plan.precision.product(x, weights.proj.rows()).view(*out.shape[:2], -1)


def _project(x: AttentionInput, weights: AttentionWeights, rows: Callable[[Tensor], Tensor]) -> Tensor:
    """[s, b, hidden] -> [s, b, number of rows]; the rows are gathered into a small copy."""
    bias = None if weights.qkv_bias is None else rows(weights.qkv_bias).reshape(-1)
    return x.project(weights.qkv.rows(rows), bias)


def project_queries(
    x: AttentionInput, weights: AttentionWeights, stage: Stage, plan: AttentionPlan, part: int = 0
) -> Tensor:
    """Queries of the stage, or its output gates: [s, b, U, d], heads rank-major."""
    rows = partial(query_rows, schedule=plan.schedule, stage=stage, head_dim=plan.head_dim, part=part)
    return _project(x, weights, rows).unflatten(2, (plan.schedule.heads_per_stage, plan.head_dim))


def project_keys_values(
    x: AttentionInput, weights: AttentionWeights, block: int, plan: AttentionPlan
) -> tuple[Tensor, Tensor]:
    """Keys and values of the block, each [s, b, P/copies * c, d], heads rank-major."""
    rows = partial(key_value_rows, schedule=plan.schedule, block=block, head_dim=plan.head_dim)
    kv = _project(x, weights, rows).unflatten(2, (-1, 2, plan.schedule.kv_per_rank, plan.head_dim))
    key, value = kv.unbind(3)
    return key.flatten(2, 3), value.flatten(2, 3)


def keys_values_by_rank(key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
    """K and V [s, b, P/copies * c, d] -> what each rank attends [s, b, P * 2c, d], keys before values.

    A KV head that several ranks attend is there for each of them.
    """
    by_rank = (2, (-1, plan.schedule.kv_per_rank))
    pairs = torch.stack((key.unflatten(*by_rank), value.unflatten(*by_rank)), dim=3)  # [s, b, P/copies, 2, c, d]
    if plan.schedule.copies > 1:
        pairs = pairs.repeat_interleave(plan.schedule.copies, dim=2)
    return pairs.flatten(2, 4)
