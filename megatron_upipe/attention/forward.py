"""UPipe's forward by stages, as a plain function on tensors and a plan.

For each stage: project the stage's rows, q/k norm and RoPE, exchange, ring attention, exchange back into the stage's
heads of one output. One exchange brings a stage's queries, together with the keys and values of the block that it
begins; one takes its output back. Collective: all ranks of the Ulysses and ring groups call with equal shapes.

Source: arXiv 2602.21196; the schedule of heads is in ``schedule.py``, the letters in ``megatron_upipe.context``.
"""

from __future__ import annotations

from torch import Tensor
from torch.profiler import record_function

from megatron_upipe.attention.heads import query_heads
from megatron_upipe.attention.input import AttentionInput
from megatron_upipe.attention.kept import DeviceAttention
from megatron_upipe.attention.pipeline import Finish, run_stages
from megatron_upipe.attention.plan import AttentionPlan, AttentionWeights, Elementwise
from megatron_upipe.attention.projections import keys_values_by_rank, project_keys_values, project_queries
from megatron_upipe.attention.rotate import Rotated, Rotation
from megatron_upipe.attention.schedule import Stage
from megatron_upipe.attention.sinks import apply_sinks_
from megatron_upipe.context.exchange import Arrival, start_to_heads, start_to_sequence
from megatron_upipe.context.packing import exchange_order
from megatron_upipe.context.pieces import RingMask
from megatron_upipe.context.ring import ring_forward
from megatron_upipe.context.segments import Segments


def attention_forward(
    x: AttentionInput, weights: AttentionWeights, elementwise: Elementwise, plan: AttentionPlan, segments: Segments
) -> DeviceAttention:
    """Attention of this rank's tokens, before output gates and the output projection.

    What it returns is owned by the caller. ``segments`` are the documents of the sequence. Padding has out 0. Stores
    nothing for autograd. Collective.
    """
    forward = _Forward(x, weights, elementwise, plan, segments)
    run_stages(plan.schedule.stages, forward.bring, forward.attend, plan.overlap)
    return DeviceAttention(forward.out.flatten(2), tuple(forward.lse), plan.schedule)


class _Forward:
    """State of one ``attention_forward``: its results so far, and K and V of the current block."""

    def __init__(self, x, weights, elementwise, plan, segments) -> None:
        self.x, self.weights, self.elementwise, self.plan = x, weights, elementwise, plan
        self.transport = plan.transport
        self.rotation = elementwise.rotation and elementwise.rotation()
        self.mask = RingMask(segments, plan.causal, plan.window)
        self.order = exchange_order(segments, plan.groups.ring_rank, x.tokens.device)
        s, b, _ = x.tokens.shape
        self.out = x.tokens.new_empty(s, b, plan.schedule.query_heads, plan.head_dim)
        self.lse: list[Tensor] = []
        self.kv: Tensor | None = None

    @record_function("upipe forward: project and send")
    def bring(self, stage: Stage) -> Arrival:
        raw = project_queries(self.x, self.weights, stage, self.plan)
        parts = [queries_to_send(raw, self.elementwise, self.rotation)]
        del raw
        if stage.begins_block:
            key, value = project_keys_values(self.x, self.weights, stage.block, self.plan)
            parts.append(keys_values_by_rank(self.elementwise.key(key, None), value, self.plan))
            del key, value
        return start_to_heads(parts, self.transport, self.order)

    @record_function("upipe forward: attention")
    def attend(self, stage: Stage, arrived: list[Tensor]) -> Finish:
        plan = self.plan
        q = arrived.pop(0)
        if stage.begins_block:
            self.kv = arrived.pop()
        out, lse = ring_forward(plan.kernel, q, self.kv, self.mask, plan.scale, plan.groups.ring)
        del q
        if stage.ends_block:
            self.kv = None
        if self.weights.sinks is not None:
            lse = apply_sinks_(out, lse, stage_sinks(self.weights.sinks, stage, plan).flatten())
        self.lse.append(lse)
        parts = [out]
        del out
        arrival = start_to_sequence(parts, self.transport, self.order)

        @record_function("upipe forward: receive")
        def finish() -> None:
            (out,) = arrival()
            view = query_heads(self.out, plan.schedule, stage, axis=2)
            view.copy_(out.unflatten(3, view.shape[3:5]))

        return finish


def queries_to_send(raw: Tensor, elementwise: Elementwise, rotation: Rotation | None) -> Tensor | Rotated:
    """[s, b, U, d] after norm and RoPE, or to be rotated on the way."""
    return elementwise.query(raw, None) if rotation is None else Rotated(raw, rotation)


def stage_sinks(sinks: Tensor, stage: Stage, plan: AttentionPlan) -> Tensor:
    """[H] -> view [c, m'] of those of the stage's heads that this rank attends, in kernel order."""
    return query_heads(sinks, plan.schedule, stage, axis=0)[plan.groups.ulysses_rank]
