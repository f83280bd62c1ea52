"""UPipe's forward and backward by stages, as plain functions on tensors and a plan.

Forward, for each stage: project the stage's rows, q/k norm and RoPE, exchange, ring attention, exchange back into the
stage's heads of one output. Backward rebuilds q, k and v of a stage from x, takes out and lse from the keep store, and
leaves each weight row its gradient once. Collective: all ranks of the Ulysses and ring groups call with equal shapes.

Source: arXiv 2602.21196; the schedule of heads is in ``schedule.py``, the letters in ``megatron_upipe.context``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megatron_upipe.attention.elementwise import ElementwiseGradient
from megatron_upipe.attention.gradients import InputGradient, WeightGradient, flat
from megatron_upipe.attention.heads import key_value_rows, projection_columns, query_heads, query_rows
from megatron_upipe.attention.input import AttentionInput
from megatron_upipe.attention.kept import DeviceAttention, KeptAttention
from megatron_upipe.attention.plan import AttentionPlan, AttentionWeights, Elementwise
from megatron_upipe.attention.projections import (
    GATE,
    exchange_keys_values,
    gated_output,
    project_keys_values,
    project_queries,
)
from megatron_upipe.attention.schedule import Stage
from megatron_upipe.attention.sinks import apply_sinks_, sink_gradient
from megatron_upipe.context.exchange import to_heads, to_sequence
from megatron_upipe.context.merge import MOST_IN_LOW_PRECISION, accumulation_dtype
from megatron_upipe.context.packing import exchange_order
from megatron_upipe.context.pieces import RingMask
from megatron_upipe.context.ring import ring_backward, ring_forward
from megatron_upipe.context.segments import Segments


@dataclass(frozen=True)
class AttentionNeeds:
    """Which gradients are wanted; those of the elementwise parameters in their order."""

    x: bool
    qkv: bool
    qkv_bias: bool
    proj: bool
    sinks: bool = False
    elementwise: tuple[bool, ...] = ()


@dataclass
class AttentionGradients:
    """None where no gradient was asked for. Owned by the caller; ``x`` may be in fp32 when many stages add to it."""

    x: Tensor | None
    qkv: Tensor | None
    qkv_bias: Tensor | None
    proj: Tensor | None
    sinks: Tensor | None = None
    elementwise: list[Tensor | None] = field(default_factory=list)


def attention_forward(
    x: AttentionInput, weights: AttentionWeights, elementwise: Elementwise, plan: AttentionPlan, segments: Segments
) -> DeviceAttention:
    """Attention of this rank's tokens, before output gates and the output projection.

    What it returns is owned by the caller. ``segments`` are the documents of the sequence. Padding has out 0. Stores
    nothing for autograd. Collective.
    """
    schedule, groups = plan.schedule, plan.groups
    mask = RingMask(segments, plan.causal, plan.window)
    order = exchange_order(segments, groups.ring_rank, x.tokens.device)
    s, b, _ = x.tokens.shape
    out = x.tokens.new_empty(s, b, schedule.query_heads, plan.head_dim)
    lse = []
    for stage in schedule.stages:
        if stage.begins_block:
            key, value = project_keys_values(x, weights, stage.block, plan)
            kv = exchange_keys_values(elementwise.key(key, None), value, plan, order)
            del key, value
        q = to_heads(elementwise.query(project_queries(x, weights, stage, plan), None), groups.ulysses, order)
        stage_out, stage_lse = ring_forward(plan.kernel, q, kv, mask, plan.scale, groups.ring)
        if weights.sinks is not None:
            stage_lse = apply_sinks_(stage_out, stage_lse, _sinks_of(weights.sinks, stage, plan).flatten())
        view = query_heads(out, schedule, stage, axis=2)
        view.copy_(to_sequence(stage_out, groups.ulysses, order).view(view.shape))
        lse.append(stage_lse)
        del q, stage_out
        if stage.ends_block:
            del kv
    return DeviceAttention(out.flatten(2), tuple(lse), schedule)


def attention_backward(
    dy: Tensor,
    x: AttentionInput,
    kept: KeptAttention,
    weights: AttentionWeights,
    elementwise: Elementwise,
    plan: AttentionPlan,
    needs: AttentionNeeds,
    segments: Segments,
) -> AttentionGradients:
    """Gradients of ``attention_forward`` followed by output gates and the output projection.

    ``dy`` is [s, b, hidden] like the tokens of ``x``, whose gradient is that of what the projections read (after the
    norm). dx lacks the sum over the tensor-parallel group, weight gradients that over data and context parallel ranks.
    Collective, whatever ``needs``.
    """
    backward = _Backward(dy, x, weights, elementwise, plan, needs, segments)
    pieces = kept.stages()
    for stage in plan.schedule.stages:
        if stage.begins_block:
            backward.begin_block(stage.block)
        backward.stage(stage, pieces)
        if stage.ends_block:
            backward.end_block(stage.block)
    return backward.gradients()


class _Backward:
    """State of one ``attention_backward``: running sums, and K and V of the current block."""

    def __init__(self, dy, x, weights, elementwise, plan, needs, segments) -> None:
        schedule = plan.schedule
        self.x, self.dtype = x, x.tokens.dtype
        self.weights, self.elementwise, self.plan, self.needs = weights, elementwise, plan, needs
        self.precision = plan.precision
        self.dy = self.precision.gradient(flat(dy), backward=needs.proj)
        self.dx = InputGradient(x.tokens, len(schedule.stages), self.precision) if needs.x else None
        fuse = plan.fuse_weight_gradients
        self.dqkv = WeightGradient(weights.qkv.parameter, fuse) if needs.qkv else None
        self.dbias = WeightGradient(weights.qkv_bias, fuse) if needs.qkv_bias else None
        self.dproj = WeightGradient(weights.proj.parameter, fuse) if needs.proj else None
        self.delementwise = ElementwiseGradient(elementwise.parameters, needs.elementwise)
        self.dsinks = None
        if needs.sinks:
            self.dsinks = torch.zeros_like(weights.sinks, dtype=accumulation_dtype(weights.sinks.dtype))
        self.mask = RingMask(segments, plan.causal, plan.window)
        self.order = exchange_order(segments, plan.groups.ring_rank, x.tokens.device)
        # gradients of projections [s, b, n] that wait for their GEMMs, and the rows of the weight that they belong to
        self.pending: list[tuple[Tensor, Callable[[Tensor], Tensor]]] = []

    def begin_block(self, block: int) -> None:
        key, value = project_keys_values(self.x, self.weights, block, self.plan)
        self.kv = exchange_keys_values(self.elementwise.key(key, None), value, self.plan, self.order)
        self.raw_key = None if self.elementwise.linear else key
        self.dk = self.dv = None

    def stage(self, stage: Stage, pieces: Iterator[tuple[Tensor, Tensor]]) -> None:
        plan, ulysses, order = self.plan, self.plan.groups.ulysses, self.order
        raw = project_queries(self.x, self.weights, stage, plan)
        q = to_heads(self.elementwise.query(raw, None), ulysses, order)
        shape = raw.shape
        if self.elementwise.linear:
            raw = None

        columns = partial(projection_columns, schedule=plan.schedule, stage=stage, head_dim=plan.head_dim)
        out, lse = next(pieces)
        projected, dout = (out, None) if not plan.output_gate else self._through_gate(stage, out, columns)
        if self.dproj is not None:
            projected = self.precision.tokens(flat(projected.flatten(2)), forward=False, backward=True)
            self.dproj.write(columns, self.precision.weight_gradient(self.dy, projected, self.dproj.dtype))
        del projected
        out = to_heads(out, ulysses, order)
        dout = to_heads(self._dprojected(columns, shape) if dout is None else dout, ulysses, order)
        if self.dsinks is not None:
            part = sink_gradient(dout, out, lse, _sinks_of(self.weights.sinks, stage, plan).flatten())
            target = _sinks_of(self.dsinks, stage, plan)
            target.copy_(part.view(target.shape))

        dq, dk, dv = ring_backward(plan.kernel, dout, q, self.kv, out, lse, self.mask, plan.scale, plan.groups.ring)
        del q, out, dout
        self._add_keys_values(stage, dk, dv)
        del dk, dv
        dq = to_sequence(dq.to(self.dtype), ulysses, order)
        dq = self.delementwise.through(self.elementwise.query, raw, dq)
        rows = partial(query_rows, schedule=plan.schedule, stage=stage, head_dim=plan.head_dim)
        self.pending.append((dq.flatten(2), rows))
        if not stage.ends_block:
            self._project_back()

    def end_block(self, block: int) -> None:
        plan, dtype = self.plan, self.dtype
        c, copies = plan.schedule.kv_per_rank, plan.schedule.copies
        dkv = torch.cat((self.dk.to(dtype), self.dv.to(dtype)), dim=1)
        self.kv = self.dk = self.dv = None
        dkv = to_sequence(dkv, plan.groups.ulysses, self.order).unflatten(2, (-1, copies, 2, c))
        if copies > 1:
            dkv = dkv.sum(3, keepdim=True, dtype=accumulation_dtype(dtype)).to(dtype)
        dkey, dvalue = dkv.squeeze(3).unbind(3)  # [s, b, P/copies, c, d]
        dkey = self.delementwise.through(self.elementwise.key, self.raw_key, dkey.flatten(2, 3))
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
            sinks=self.dsinks,
            elementwise=self.delementwise.result(),
        )

    def _add_keys_values(self, stage: Stage, dk: Tensor, dv: Tensor) -> None:
        """dK and dV of a block's stages are summed in the precision they come in if those are few, else in fp32."""
        if not stage.begins_block:
            self.dk += dk
            self.dv += dv
        elif stage.ends_block:
            self.dk, self.dv = dk, dv
        else:
            parts = self.plan.groups.layout.ring_size * self.mask.additions * self.plan.schedule.stages_per_block
            dtype = dk.dtype if parts <= MOST_IN_LOW_PRECISION else accumulation_dtype(dk.dtype)
            self.dk, self.dv = dk.to(dtype), dv.to(dtype)

    def _dprojected(self, columns: Callable[[Tensor], Tensor], shape: torch.Size) -> Tensor:
        """Gradient of the stage's part of the output projection's input."""
        return self.precision.input_gradient(self.dy, self.weights.proj.columns(columns)).view(shape)

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
        widths = [gradient.shape[2] for gradient, _ in self.pending]
        parts = [rows for _, rows in self.pending]
        gradient = torch.cat([gradient for gradient, _ in self.pending], dim=2)
        self.pending.clear()
        if self.dbias is not None:
            bias = gradient.sum((0, 1), dtype=accumulation_dtype(gradient.dtype))
            for rows, part in zip(parts, bias.split(widths), strict=True):
                self.dbias.write(rows, part)
        if self.dx is None and self.dqkv is None:
            return
        weight = None if self.dx is None else self.weights.qkv.rows(*parts, backward=True)
        total = None
        for tokens, x in self.x.tiles():
            dy = self.precision.gradient(flat(gradient[tokens]), weight is not None, self.dqkv is not None)
            if weight is not None:
                self.dx.add(tokens, dy, weight)
            if self.dqkv is not None:
                # tiles are summed in fp32
                several = total is not None or tokens != slice(None)
                dtype = accumulation_dtype(gradient.dtype) if several else self.dqkv.dtype
                total = self.precision.weight_gradient(dy, x, dtype, total)
        if total is not None:
            for rows, part in zip(parts, total.split(widths), strict=True):
                self.dqkv.write(rows, part)


def _sinks_of(sinks: Tensor, stage: Stage, plan: AttentionPlan) -> Tensor:
    """[H] -> view [c, m'] of those of the stage's heads that this rank attends, in kernel order."""
    return query_heads(sinks, plan.schedule, stage, axis=0)[plan.groups.ulysses_rank]
