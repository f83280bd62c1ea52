"""UPipe's forward and backward by stages, as plain functions on tensors and a plan.

Forward, for each stage: project the stage's rows, q/k norm and RoPE, exchange, ring attention, exchange back into the
stage's heads of one output. Backward rebuilds q, k and v of a stage from x, takes out and lse from the keep store, and
leaves each weight row its gradient once. Collective: all ranks of the Ulysses and ring groups call with equal shapes.

Source: arXiv 2602.21196; the schedule of heads is in ``schedule.py``, the letters in ``megatron_upipe.context``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megatron_upipe.attention.gradients import InputGradient, WeightGradient
from megatron_upipe.attention.heads import key_value_rows, projection_columns, query_heads, query_rows
from megatron_upipe.attention.plan import AttentionPlan, AttentionWeights, Elementwise
from megatron_upipe.attention.projections import (
    GATE,
    exchange_keys_values,
    gated_output,
    project_keys_values,
    project_queries,
)
from megatron_upipe.attention.schedule import Stage
from megatron_upipe.context.exchange import to_heads, to_sequence
from megatron_upipe.context.merge import accumulation_dtype
from megatron_upipe.context.ring import ring_backward, ring_forward
from megatron_upipe.errors import UPipeError
from megatron_upipe.memory.keep_store import KeptAttention


@dataclass(frozen=True)
class AttentionNeeds:
    """Which gradients are wanted; those of the elementwise parameters in their order."""

    x: bool
    qkv: bool
    qkv_bias: bool
    proj: bool
    elementwise: tuple[bool, ...] = ()


@dataclass
class AttentionGradients:
    """None where no gradient was asked for. Owned by the caller."""

    x: Tensor | None
    qkv: Tensor | None
    qkv_bias: Tensor | None
    proj: Tensor | None
    elementwise: list[Tensor | None] = field(default_factory=list)


def attention_forward(
    x: Tensor, weights: AttentionWeights, elementwise: Elementwise, plan: AttentionPlan, segments: None = None
) -> tuple[KeptAttention, Tensor]:
    """Attention of ``x`` [s, b, hidden], this rank's tokens, before the output projection.

    Returns what backward needs, and the input of the output projection [s, b, H*d]: the kept output itself, or with
    output gates another tensor. Both are owned by the caller. ``segments`` (packed documents) must be None in this
    version. Stores nothing for autograd. Collective.
    """
    _refuse_segments(segments)
    schedule = plan.schedule
    s, b, _ = x.shape
    out = x.new_empty(s, b, schedule.query_heads, plan.head_dim)
    gated = torch.empty_like(out) if plan.output_gate else out
    lse = []
    for stage in schedule.stages:
        if stage.begins_block:
            key, value = project_keys_values(x, weights, stage.block, plan)
            kv = exchange_keys_values(elementwise.key(key, None), value, plan)
            del key, value
        q = to_heads(elementwise.query(project_queries(x, weights, stage, plan), None), plan.groups.ulysses)
        stage_out, stage_lse = ring_forward(plan.kernel, q, kv, plan.causal, plan.scale, plan.groups.ring)
        view = query_heads(out, schedule, stage, axis=2)
        view.copy_(to_sequence(stage_out, plan.groups.ulysses).view(view.shape))
        if plan.output_gate:
            gate = project_queries(x, weights, stage, plan, part=GATE)
            query_heads(gated, schedule, stage, axis=2).copy_(gated_output(view, gate.view(view.shape)))
        lse.append(stage_lse)
        del q, stage_out
        if stage.ends_block:
            del kv
    return KeptAttention(out.flatten(2), tuple(lse)), gated.flatten(2)


def attention_backward(
    dy: Tensor,
    x: Tensor,
    kept: KeptAttention,
    weights: AttentionWeights,
    elementwise: Elementwise,
    plan: AttentionPlan,
    needs: AttentionNeeds,
    segments: None = None,
) -> AttentionGradients:
    """Gradients of ``attention_forward`` followed by the output projection.

    ``dy`` and ``x`` are [s, b, hidden], this rank's tokens, whole along the hidden axis; dx lacks the sum over the
    tensor-parallel group, weight gradients that over data and context parallel ranks. Collective, whatever ``needs``.
    """
    _refuse_segments(segments)
    backward = _Backward(dy, x, kept, weights, elementwise, plan, needs)
    for stage, lse in zip(plan.schedule.stages, kept.lse, strict=True):
        if stage.begins_block:
            backward.begin_block(stage.block)
        backward.stage(stage, lse)
        if stage.ends_block:
            backward.end_block(stage.block)
    return backward.gradients()


class _Backward:
    """State of one ``attention_backward``: running sums, and K and V of the current block."""

    def __init__(self, dy, x, kept, weights, elementwise, plan, needs) -> None:
        schedule = plan.schedule
        self.dy, self.x, self.kept = dy, x, kept
        self.weights, self.elementwise, self.plan, self.needs = weights, elementwise, plan, needs
        self.dx = InputGradient(x, additions=len(schedule.stages)) if needs.x else None
        fuse = plan.fuse_weight_gradients
        self.dqkv = WeightGradient(weights.qkv, fuse) if needs.qkv else None
        self.dbias = WeightGradient(weights.qkv_bias, fuse) if needs.qkv_bias else None
        self.dproj = WeightGradient(weights.proj, fuse) if needs.proj else None
        # in accumulation dtype, so that their gradients are not rounded at every stage
        self.parameters = [
            p.detach().to(accumulation_dtype(p.dtype), copy=True).requires_grad_(needed)
            for p, needed in zip(elementwise.parameters, needs.elementwise, strict=True)
        ]
        # gradients of projections [s, b, n] that wait for their GEMMs, and the rows of the weight that they belong to
        self.pending: list[tuple[Tensor, Callable[[Tensor], Tensor]]] = []

    def begin_block(self, block: int) -> None:
        key, value = project_keys_values(self.x, self.weights, block, self.plan)
        self.kv = exchange_keys_values(self.elementwise.key(key, None), value, self.plan)
        self.raw_key = None if self.elementwise.linear else key
        self.dk = self.dv = None

    def stage(self, stage: Stage, lse: Tensor) -> None:
        plan, ulysses = self.plan, self.plan.groups.ulysses
        raw = project_queries(self.x, self.weights, stage, plan)
        q = to_heads(self.elementwise.query(raw, None), ulysses)
        shape = raw.shape
        if self.elementwise.linear:
            raw = None

        columns = partial(projection_columns, schedule=plan.schedule, stage=stage, head_dim=plan.head_dim)
        out = query_heads(self.kept.out.unflatten(2, (plan.schedule.query_heads, -1)), plan.schedule, stage, axis=2)
        out = out.reshape(shape)
        projected, dout = (out, None) if not plan.output_gate else self._through_gate(stage, out, columns)
        if self.dproj is not None:
            self.dproj.write_product(columns, _flat(self.dy), _flat(projected.flatten(2)))
        del projected
        out = to_heads(out, ulysses)
        dout = to_heads(self._dprojected(columns, shape) if dout is None else dout, ulysses)

        dq, dk, dv = ring_backward(plan.kernel, dout, q, self.kv, out, lse, plan.causal, plan.scale, plan.groups.ring)
        del q, out, dout
        self._add_keys_values(stage, dk, dv)
        del dk, dv
        dq = to_sequence(dq.to(self.x.dtype), ulysses)
        dq = self._through(self.elementwise.query, raw, dq)
        rows = partial(query_rows, schedule=plan.schedule, stage=stage, head_dim=plan.head_dim)
        self.pending.append((dq.flatten(2), rows))
        if not stage.ends_block:
            self._project_back()

    def end_block(self, block: int) -> None:
        plan, dtype = self.plan, self.x.dtype
        c, copies = plan.schedule.kv_per_rank, plan.schedule.copies
        dkv = torch.cat((self.dk.to(dtype), self.dv.to(dtype)), dim=1)
        self.kv = self.dk = self.dv = None
        dkv = to_sequence(dkv, plan.groups.ulysses).unflatten(2, (-1, copies, 2, c))
        if copies > 1:
            dkv = dkv.sum(3, keepdim=True, dtype=accumulation_dtype(dtype)).to(dtype)
        dkey, dvalue = dkv.squeeze(3).unbind(3)  # [s, b, P/copies, c, d]
        dkey = self._through(self.elementwise.key, self.raw_key, dkey.flatten(2, 3))
        dkv = torch.stack((dkey.view(dvalue.shape), dvalue), dim=3)
        rows = partial(key_value_rows, schedule=plan.schedule, block=block, head_dim=plan.head_dim)
        self.pending.append((dkv.flatten(2), rows))
        self._project_back()
        self.raw_key = None

    def gradients(self) -> AttentionGradients:
        return AttentionGradients(
            x=self.dx and self.dx.result(),
            qkv=self.dqkv and self.dqkv.result(),
            qkv_bias=self.dbias and self.dbias.result(),
            proj=self.dproj and self.dproj.result(),
            elementwise=[p.grad for p in self.parameters],
        )

    def _add_keys_values(self, stage: Stage, dk: Tensor, dv: Tensor) -> None:
        """dK and dV of a block's stages are summed in accumulation dtype."""
        if not stage.begins_block:
            self.dk += dk
            self.dv += dv
        elif stage.ends_block:
            self.dk, self.dv = dk, dv
        else:
            dtype = accumulation_dtype(dk.dtype)
            self.dk, self.dv = dk.to(dtype), dv.to(dtype)

    def _through(self, function: Callable, raw: Tensor | None, gradient: Tensor) -> Tensor:
        """Gradient of the input of an elementwise function; those of its parameters are added up in ``parameters``.

        ``raw`` is the input, or None for a linear function, whose backward is the same everywhere.
        """
        raw = (gradient if raw is None else raw).detach().requires_grad_()
        with torch.enable_grad():
            if self.parameters:
                output = function(raw.to(accumulation_dtype(raw.dtype)), self.parameters)
            else:
                output = function(raw, None)
        wanted = [p for p in self.parameters if p.requires_grad]
        draw, *rest = torch.autograd.grad(output, (raw, *wanted), gradient.to(output.dtype), allow_unused=True)
        for parameter, part in zip(wanted, rest, strict=True):
            if part is not None:
                parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)
        return draw

    def _dprojected(self, columns: Callable[[Tensor], Tensor], shape: torch.Size) -> Tensor:
        """Gradient of the stage's part of the output projection's input."""
        return (self.dy @ columns(self.weights.proj).reshape(self.dy.shape[-1], -1)).view(shape)

    def _through_gate(self, stage: Stage, out: Tensor, columns: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """The gated output again, and the gradient of ``out``; that of the gates waits for its GEMM."""
        gate = project_queries(self.x, self.weights, stage, self.plan, part=GATE).requires_grad_()
        out = out.detach().requires_grad_()
        with torch.enable_grad():
            gated = gated_output(out, gate)
        dout, dgate = torch.autograd.grad(gated, (out, gate), self._dprojected(columns, out.shape))
        rows = partial(query_rows, schedule=self.plan.schedule, stage=stage, head_dim=self.plan.head_dim, part=GATE)
        self.pending.append((dgate.flatten(2), rows))
        return gated.detach(), dout

    def _project_back(self) -> None:
        """dx, and the gradients of rows of the weight and bias, from the pending gradients of projections.

        One addition to dx for all of them: the block's last queries go together with its keys and values.
        """
        gradients = [_flat(gradient) for gradient, _ in self.pending]
        if self.dx is not None:
            weights = [rows(self.weights.qkv).reshape(-1, self.x.shape[-1]) for _, rows in self.pending]
            self.dx.add(torch.cat(gradients, dim=1), torch.cat(weights))
        for flat, (_, rows) in zip(gradients, self.pending, strict=True):
            if self.dqkv is not None:
                self.dqkv.write_product(rows, flat, _flat(self.x))
            if self.dbias is not None:
                self.dbias.write(rows, flat.sum(0, dtype=accumulation_dtype(flat.dtype)))
        self.pending.clear()


def _flat(tensor: Tensor) -> Tensor:
    """[s, b, n] -> [s*b, n]."""
    return tensor.reshape(-1, tensor.shape[-1])


def _refuse_segments(segments: None) -> None:
    if segments is not None:
        raise UPipeError("packed documents (segments) are not supported by UPipe in this version")
