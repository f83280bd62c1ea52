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

from megatron_upipe.attention.core import AttentionNeeds, attention_backward, attention_forward
from megatron_upipe.attention.input import AttentionInput
from megatron_upipe.attention.kept import DeviceAttention
from megatron_upipe.attention.plan import AttentionPlan, AttentionWeights, Elementwise
from megatron_upipe.attention.projections import gate_output


@dataclass(frozen=True)
class AttentionCall:
    """One forward call and its backward.

    ``weights`` asks the modules for the parameters; ``project`` is Megatron's ``linear_proj`` on [s, b, H*d], with its
    sum over the tensor-parallel group. ``gather`` makes an activation whole along the sequence under sequence
    parallelism, ``reduce_input`` sums a gradient of x over the tensor-parallel group (and shards it again), ``gather``
    also serves dy. These three are collective over the tensor-parallel group, identities where there is none.
    """

    plan: AttentionPlan
    elementwise: Elementwise
    weights: Callable[[], AttentionWeights]
    project: Callable[[Tensor], Tensor]
    gather: Callable[[Tensor], Tensor]
    reduce_input: Callable[[Tensor], Tensor]
    tensor_parallel_size: int = 1


class UPipeAttentionFunction(torch.autograd.Function):
    """``apply(grad_enabled, call, x, qkv, qkv_bias, proj, *elementwise parameters)`` -> y."""

    @staticmethod
    def forward(
        ctx: Any,
        grad_enabled: bool,
        call: AttentionCall,
        x: Tensor,
        qkv: Tensor,
        qkv_bias: Tensor | None,
        proj: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        # Grad mode is off in here whatever the caller's is, hence the argument.
        weights = AttentionWeights(qkv, qkv_bias, proj)
        gathered = AttentionInput(call.gather(x))
        kept = attention_forward(gathered, weights, call.elementwise, call.plan)
        if grad_enabled:
            ctx.call = call
            ctx.save_for_backward(x, kept.out, *kept.lse)
        return call.project(gate_output(gathered, kept.out, weights, call.plan))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        call: AttentionCall = ctx.call
        x, out, *lse = ctx.saved_tensors
        _, _, needs_x, needs_qkv, needs_bias, needs_proj, *needs_parameters = ctx.needs_input_grad
        gradients = attention_backward(
            call.gather(dy),
            AttentionInput(call.gather(x)),
            DeviceAttention(out, tuple(lse), call.plan.schedule),
            call.weights(),
            call.elementwise,
            call.plan,
            AttentionNeeds(needs_x, needs_qkv, needs_bias, needs_proj, tuple(needs_parameters)),
        )
        dx = None if gradients.x is None else call.reduce_input(gradients.x.to(x.dtype))
        return None, None, dx, gradients.qkv, gradients.qkv_bias, gradients.proj, *gradients.elementwise
