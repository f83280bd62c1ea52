"""The autograd Function of the attention module: projections, exchange, attention and output projection as one node.

Kept for backward: x (as handed in, sharded under sequence parallelism), the attention output and lse. Weights are not
saved; backward asks their modules again, so that sharded or gathered parameters are current.

A layer that is not UPipe's own gets its attention from here; ``layers/function.py`` has the whole layer in one node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_upipe.attention.backward import AttentionNeeds, attention_backward
from megatron_upipe.attention.forward import attention_forward
from megatron_upipe.attention.input import AttentionInput
from megatron_upipe.attention.kept import DeviceAttention
from megatron_upipe.attention.plan import AttentionParameters, AttentionPlan, AttentionWeights, Elementwise
from megatron_upipe.attention.projections import gate_output, project_output
from megatron_upipe.context.segments import Segments


@dataclass(frozen=True)
class AttentionCall:
    """One forward call and its backward.

    ``parameters`` asks the modules for them; ``gather`` and ``reduce`` as in ``TensorParallel``.
    """

    plan: AttentionPlan
    elementwise: Elementwise
    parameters: Callable[[], AttentionParameters]
    gather: Callable[[Tensor], Tensor]
    reduce: Callable[[Tensor], Tensor]
    segments: Segments
    tensor_parallel_size: int = 1

    def weights(self) -> AttentionWeights:
        """The parameters for one pass."""
        return AttentionWeights.of(self.parameters(), self.plan.precision)

    def project(self, out: Tensor, weights: AttentionWeights) -> Tensor:
        """The output projection of [t, b, H*d] -> [t/TP or t, b, hidden], without bias. Collective like ``reduce``."""
        return self.reduce(project_output(out, weights, self.plan))


class UPipeAttentionFunction(torch.autograd.Function):
    """``apply(grad_enabled, call, x, *call.parameters(), *elementwise parameters)`` -> y."""

    @staticmethod
    def forward(
        ctx: Any,
        grad_enabled: bool,
        call: AttentionCall,
        x: Tensor,
        qkv: Tensor,
        qkv_bias: Tensor | None,
        proj: Tensor,
        sinks: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        # Grad mode is off in here whatever the caller's is, hence the argument.
        weights = AttentionWeights.of(AttentionParameters(qkv, qkv_bias, proj, sinks), call.plan.precision)
        gathered = AttentionInput(call.gather(x), call.plan.precision)
        kept = attention_forward(gathered, weights, call.elementwise, call.plan, call.segments)
        if grad_enabled:
            ctx.call = call
            ctx.save_for_backward(x, kept.out, *kept.lse)
        return call.project(gate_output(gathered, kept.out, weights, call.plan), weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        call: AttentionCall = ctx.call
        x, out, *lse = ctx.saved_tensors
        _, _, needs_x, needs_qkv, needs_bias, needs_proj, needs_sinks, *needs_parameters = ctx.needs_input_grad
        gradients = attention_backward(
            call.gather(dy),
            AttentionInput(call.gather(x), call.plan.precision, backward=needs_qkv),
            DeviceAttention(out, tuple(lse), call.plan.schedule),
            call.weights(),
            call.elementwise,
            call.plan,
            AttentionNeeds(needs_x, needs_qkv, needs_bias, needs_proj, needs_sinks, tuple(needs_parameters)),
            call.segments,
        )
        dx = None if gradients.x is None else call.reduce(gradients.x.to(x.dtype))
        weights = (gradients.qkv, gradients.qkv_bias, gradients.proj, gradients.sinks)
        return None, None, dx, *weights, *gradients.elementwise
