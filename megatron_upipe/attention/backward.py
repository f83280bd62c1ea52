"""UPipe's backward by stages, as a plain function on tensors and a plan.

It rebuilds q, k and v of a stage from x, takes out and lse from the keep store, and leaves each weight row its gradient
once. One exchange brings a stage's queries, the output's gradient and its product with the output (``delta.py``),
together with the keys and values of the block that the stage begins; one takes the queries' gradient back, and that of
the keys and values of the block that it ends. Collective: all ranks of the Ulysses and ring groups call with equal
shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.profiler import record_function

from megatron_upipe.attention.delta import as_elements, deltas, from_elements, out_with_delta
from megatron_upipe.attention.elementwise import ElementwiseGradient
from megatron_upipe.attention.forward import queries_to_send, stage_sinks
from megatron_upipe.attention.gradients import InputGradient, WeightGradient, flat
from megatron_upipe.attention.heads import key_value_rows, projection_columns, query_rows
from megatron_upipe.attention.input import AttentionInput
from megatron_upipe.attention.kept import KeptAttention
from megatron_upipe.attention.pipeline import Finish, run_stages
from megatron_upipe.attention.plan import AttentionPlan, AttentionWeights, Elementwise
from megatron_upipe.attention.projections import (
    GATE,
    gated_output,
    keys_values_by_rank,
    project_keys_values,
    project_queries,
)
from megatron_upipe.attention.rotate import rotate
from megatron_upipe.attention.schedule import Stage
from megatron_upipe.attention.sinks import sink_gradient
from megatron_upipe.context.exchange import start_to_heads, start_to_sequence
from megatron_upipe.context.merge import MOST_IN_LOW_PRECISION, accumulation_dtype
from megatron_upipe.context.packing import exchange_order
from megatron_upipe.context.pieces import RingMask
from megatron_upipe.context.ring import ring_backward
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
    backward = _Backward(dy, x, kept, weights, elementwise, plan, needs, segments)
    run_stages(plan.schedule.stages, backward.bring, backward.attend, plan.overlap)
    return backward.gradients()


@dataclass
class _Block:
    """A KV block: its keys before norm and RoPE where their backward needs them; from its first stage to its last K and
    V and the sums of their gradients, and ``rest``, which adds what still travels."""

    raw_key: Tensor | None
    kv: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    rest: Callable[[], None] | None = None

    def add_up(self) -> None:
        rest, self.rest = self.rest, None
        if rest is not None:
            rest()


@dataclass
class _Stage:
    """A stage on its way: what waits for the end of it, and what its attention needs."""

    stage: Stage
    raw: Tensor | None
    dgate: Tensor | None = None
    block: _Block | None = None
    q: Tensor | None = None
    dout: Tensor | None = None
    delta: Tensor | None = None
    lse: Tensor | None = None


class _Backward:
    """State of one ``attention_backward``: running sums, and the KV block of the stage brought last."""

    def __init__(self, dy, x, kept, weights, elementwise, plan, needs, segments) -> None:
        schedule = plan.schedule
        self.x, self.dtype, self.transport = x, x.tokens.dtype, plan.transport
        self.rotation = elementwise.rotation and elementwise.rotation()
        self.kept, self.coming = kept.stages(), None
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

    @record_function("upipe backward: project and send")
    def bring(self, stage: Stage) -> Callable[[], _Stage]:
        plan, elementwise = self.plan, self.elementwise
        raw = project_queries(self.x, self.weights, stage, plan)
        current = _Stage(stage, None if elementwise.linear else raw)
        columns = partial(projection_columns, schedule=plan.schedule, stage=stage, head_dim=plan.head_dim)
        kept_out, current.lse = next(self.kept)
        dout = self.precision.input_gradient(self.dy, self.weights.proj.columns(columns)).view(raw.shape)
        projected = kept_out
        if plan.output_gate:
            projected, dout = self._through_gate(current, kept_out, dout)
        if self.dproj is not None:
            projected = self.precision.tokens(flat(projected.flatten(2)), forward=False, backward=True)
            self.dproj.write(columns, self.precision.weight_gradient(self.dy, projected, self.dproj.dtype))
        delta = deltas(dout, kept_out)
        parts = [queries_to_send(raw, elementwise, self.rotation), dout, as_elements(delta, dout.dtype)]
        del raw, kept_out, projected, dout, delta
        if stage.begins_block:
            key, value = project_keys_values(self.x, self.weights, stage.block, plan)
            self.coming = _Block(None if elementwise.linear else key)
            parts.append(keys_values_by_rank(elementwise.key(key, None), value, plan))
            del key, value
        current.block = self.coming
        arrival = start_to_heads(parts, self.transport, self.order)

        def wait() -> _Stage:
            current.q, current.dout, current.delta, *kv = arrival()
            if kv:
                (current.block.kv,) = kv
            return current

        return wait

    @record_function("upipe backward: attention")
    def attend(self, stage: Stage, current: _Stage) -> Finish:
        plan, block = self.plan, current.block
        q, dout, lse, delta = current.q, current.dout, current.lse, from_elements(current.delta)
        current.q = current.dout = current.lse = current.delta = None
        if self.dsinks is not None:
            part = sink_gradient(delta, lse, stage_sinks(self.weights.sinks, stage, plan).flatten())
            target = stage_sinks(self.dsinks, stage, plan)
            target.copy_(part.view(target.shape))
        out = out_with_delta(dout, delta)
        del delta
        dq, rest = ring_backward(plan.kernel, dout, q, block.kv, out, lse, self.mask, plan.scale, plan.groups.ring)
        del q, out, dout
        parts = [dq.to(self.dtype)]
        del dq
        block.add_up()  # what the stage before has left on its way around the ring
        block.rest = partial(self._add_keys_values, stage, block, rest)
        del rest
        if stage.ends_block or not plan.overlap or plan.groups.ring is None:
            block.add_up()
        if stage.ends_block:
            parts.append(torch.cat((block.dk.to(self.dtype), block.dv.to(self.dtype)), dim=1))
            block.kv = block.dk = block.dv = None
        arrival = start_to_sequence(parts, self.transport, self.order)
        return lambda: self._finish(current, arrival())

    @record_function("upipe backward: receive and project")
    def _finish(self, current: _Stage, arrived: list[Tensor]) -> None:
        stage = current.stage
        if current.dgate is not None:
            self.pending.append((current.dgate.flatten(2), self._rows(stage, GATE)))
        dq = self._before_elementwise(current, arrived.pop(0))
        self.pending.append((dq.flatten(2), self._rows(stage)))
        current.dgate = current.raw = None
        if stage.ends_block:
            self._end_block(current, arrived.pop())
        self._project_back()

    def _before_elementwise(self, current: _Stage, dq: Tensor) -> Tensor:
        """From the gradient of what was exchanged, [s, b, P, m, d], to that of the projected queries [s, b, U, d]."""
        if self.rotation is None:
            return self.delementwise.through(self.elementwise.query, current.raw, dq.flatten(2, 3))
        raw = torch.empty(dq.shape, dtype=dq.dtype, device=dq.device)
        rotate(dq, raw, self.rotation, back=True)
        return raw.flatten(2, 3)

    def _end_block(self, current: _Stage, dkv: Tensor) -> None:
        """From the gradient of what all ranks attend [s, b, P, 2c, d] to that of the block's keys and values."""
        schedule = self.plan.schedule
        dkv = dkv.unflatten(3, (2, -1)).unflatten(2, (-1, schedule.copies))  # [s, b, P/copies, copies, 2, c, d]
        if schedule.copies > 1:
            dkv = dkv.sum(3, keepdim=True, dtype=accumulation_dtype(self.dtype)).to(self.dtype)
        dkey, dvalue = dkv.squeeze(3).unbind(3)  # [s, b, P/copies, c, d]
        dkey = self.delementwise.through(self.elementwise.key, current.block.raw_key, dkey.flatten(2, 3))
        current.block.raw_key = None
        dkv = torch.stack((dkey.view(dvalue.shape), dvalue), dim=3)
        rows = partial(key_value_rows, schedule=schedule, block=current.stage.block, head_dim=self.plan.head_dim)
        self.pending.append((dkv.flatten(2), rows))

    def gradients(self) -> AttentionGradients:
        return AttentionGradients(
            x=self.dx and self.dx.result(),
            qkv=self.dqkv and self.dqkv.result(),
            qkv_bias=self.dbias and self.dbias.result(),
            proj=self.dproj and self.dproj.result(),
            sinks=self.dsinks,
            elementwise=self.delementwise.result(),
        )

    def _add_keys_values(self, stage: Stage, block: _Block, rest: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """dK and dV of a block's stages are summed in the precision they come in if those are few, else in fp32."""
        dk, dv = rest()
        if not stage.begins_block:
            block.dk += dk
            block.dv += dv
        elif stage.ends_block:
            block.dk, block.dv = dk, dv
        else:
            parts = self.plan.groups.layout.ring_size * self.mask.additions * self.plan.schedule.stages_per_block
            dtype = dk.dtype if parts <= MOST_IN_LOW_PRECISION else accumulation_dtype(dk.dtype)
            block.dk, block.dv = dk.to(dtype), dv.to(dtype)

    def _through_gate(self, current: _Stage, out: Tensor, dgated: Tensor) -> tuple[Tensor, Tensor]:
        """The gated output again, and the gradient of ``out``; that of the gates waits for its GEMM."""
        gate = project_queries(self.x, self.weights, current.stage, self.plan, part=GATE).requires_grad_()
        out = out.detach().requires_grad_()
        with torch.enable_grad():
            gated = gated_output(out, gate)
        dout, current.dgate = torch.autograd.grad(gated, (out, gate), dgated)
        return gated.detach(), dout

    def _rows(self, stage: Stage, part: int = 0) -> Callable[[Tensor], Tensor]:
        return partial(query_rows, schedule=self.plan.schedule, stage=stage, head_dim=self.plan.head_dim, part=part)

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
