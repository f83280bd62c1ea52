"""A whole transformer layer as one autograd node.

Between forward and backward only the layer's input waits, and attention's output and lse where they are kept. The
hidden state after attention is never stored: each tile of the second half makes its rows again from the input and the
attention output. The incoming gradient becomes that of this hidden state tile by tile, in the same memory where nobody
else holds it, and then goes through attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_upipe.attention.backward import AttentionNeeds, attention_backward
from megatron_upipe.attention.elementwise import ElementwiseGradient
from megatron_upipe.attention.forward import attention_forward
from megatron_upipe.attention.function import AttentionCall
from megatron_upipe.attention.gradients import WeightGradient
from megatron_upipe.attention.input import AttentionInput
from megatron_upipe.attention.kept import DeviceAttention, KeptAttention
from megatron_upipe.attention.plan import AttentionParameters
from megatron_upipe.attention.projections import gate_output
from megatron_upipe.context.merge import accumulation_dtype
from megatron_upipe.layers.chain import Chain, Waiting
from megatron_upipe.layers.holding import held_alone, holders
from megatron_upipe.layers.tiles import Tiles
from megatron_upipe.memory.host_store import HostStore


@dataclass(frozen=True)
class LayerCall:
    """One forward call of a layer and its backward; ``attention`` as in the attention module.

    ``norm`` is the input norm, with its own parameters or others; ``add_attention`` the output bias and the residual
    connection; ``second_half`` begins a forward pass of norm, MLP and residual connection of [t, b, hidden],
    ``second_half_backward`` its backward from the needs of ``mlp_parameters``. ``tiles`` are those of the second half,
    ``norm_tiles`` those of the input norm. ``again`` runs the layer's forward in backward, as a call of its module.
    ``before_backward`` is called with the bytes of the layer's output.
    """

    attention: AttentionCall
    norm: Callable[[Tensor, Any], Tensor]
    norm_parameters: tuple[Tensor, ...]
    proj_bias: Tensor | None
    add_attention: Callable[[Tensor, Tensor], Tensor]
    second_half: Callable[[], Callable[[Tensor], Tensor]]
    second_half_backward: Callable[[list[bool]], Any]
    mlp_parameters: tuple[Tensor, ...]
    tiles: Tiles
    norm_tiles: Tiles
    again: Callable[[Callable[[], Tensor], Tensor], Tensor]
    before_backward: Callable[[int], None]

    def parameters(self) -> list[Tensor | None]:
        """Inputs of the node, in the order of its gradients."""
        attention = self.attention.parameters()
        elementwise = self.attention.elementwise.parameters
        return [*self.norm_parameters, *attention, *elementwise, self.proj_bias, *self.mlp_parameters]

    def attend(self, x: Tensor) -> DeviceAttention:
        """The first half before its output projection. Collective."""
        call = self.attention
        return attention_forward(self.attention_input(x), call.weights(), call.elementwise, call.plan, call.segments)

    def finish(self, x: Tensor, kept: KeptAttention) -> Tensor:
        """The layer's output [s/TP, b, hidden] from its input and attention. Collective over tensor parallelism."""
        pieces, second_half = self.hidden(x, kept), self.second_half()
        if self.tiles.size == self.tiles.tokens:
            _, hidden = next(pieces)
            return second_half(hidden)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        for rows, hidden in pieces:
            y[rows] = second_half(hidden)
        return y

    def hidden(self, x: Tensor, kept: KeptAttention) -> Iterator[tuple[slice, Tensor]]:
        """Tile by tile the hidden state after attention. Collective over tensor parallelism."""
        call, weights = self.attention, self.attention.weights()
        pieces = kept.rows(self.tiles.gathered())
        for rows in self.tiles.rows():
            out = next(pieces)
            if call.plan.output_gate:
                normed = AttentionInput(call.gather(self.norm(x[rows], None)), call.plan.precision)
                out = gate_output(normed, out, weights, call.plan)
            out = call.project(out, weights)
            yield rows, self.add_attention(out, x[rows])

    def second_half_gradient(
        self, x: Tensor, kept: KeptAttention, dhidden: Tensor, wanted: Needs
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Turns ``dhidden``, at first the gradient of the layer's output, into that of the hidden state.

        In place, tile by tile. Returns the gradients of the output projection's bias and of ``mlp_parameters``.
        Collective over tensor parallelism.
        """
        second_half = self.second_half_backward(wanted.mlp)
        dbias = WeightGradient(self.proj_bias, fuse=False, summed=True) if wanted.proj_bias else None
        for rows, hidden in self.hidden(x, kept):
            dhidden[rows] = second_half.tile(hidden, dhidden[rows])
            if dbias is not None:
                dbias.add(dhidden[rows].sum((0, 1), dtype=accumulation_dtype(dhidden.dtype)))
            del hidden
        return dbias and dbias.result(), second_half.result()

    def input_gradient(
        self, x: Tensor, dhidden: Tensor, dnormed: Tensor | None, needs: list[bool]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Gradients of ``x``, written over ``dhidden``, and of ``norm_parameters``. Collective over tensor parallelism.

        ``dhidden`` is the gradient of the residual connection, ``dnormed`` that of the normed input before the sum over
        tensor parallelism; None if nobody wants it.
        """
        dnorm = ElementwiseGradient(self.norm_parameters, needs)
        if dnormed is None:
            return None, dnorm.result()
        if self.attention.tensor_parallel_size > 1:
            dnormed = self.attention.reduce(dnormed.to(x.dtype))
        for rows in self.norm_tiles.rows():
            dhidden[rows] += dnorm.through(self.norm, x[rows], dnormed[rows])
        return dhidden, dnorm.result()

    def attention_input(self, x: Tensor, backward: bool = False) -> AttentionInput:
        """The normed input; as a whole only where sequence parallelism has to gather it."""
        precision = self.attention.plan.precision
        if self.norm_tiles.shards > 1:
            return AttentionInput(self.attention.gather(self.norm(x, None)), precision, backward=backward)
        return AttentionInput(x, precision, lambda rows: self.norm(rows, None), self.norm_tiles.size, backward)

    def split_needs(self, needs: list[bool], needs_x: bool) -> Needs:
        """``ctx.needs_input_grad`` of ``parameters()``, by part."""
        rest = iter(needs)
        norm = [next(rest) for _ in self.norm_parameters]
        qkv, qkv_bias, proj, sinks = (next(rest) for _ in AttentionParameters._fields)
        elementwise = tuple(next(rest) for _ in self.attention.elementwise.parameters)
        attention = AttentionNeeds(needs_x or any(norm), qkv, qkv_bias, proj, sinks, elementwise)
        return Needs(norm, attention, proj_bias=next(rest), mlp=list(rest))


class Needs(NamedTuple):
    """Which gradients are wanted."""

    norm: list[bool]
    attention: AttentionNeeds
    proj_bias: bool
    mlp: list[bool]


@dataclass(frozen=True)
class Policy:
    """What a layer keeps for backward, and where; the same on all ranks of a pipeline stage.

    ``frees_input``: the layer's input, received from the pipeline stage before, is read by nobody else; its memory is
    given up once the store has it.
    """

    store: HostStore | None
    keep_attention: bool
    checkpoint_every: int
    prefetch: str
    frees_input: bool

    def prefetches(self, x: Tensor, overlap: bool) -> bool:
        """Whether the next layer's input, as large as ``x``, is fetched during this layer's attention backward."""
        if self.store is None or self.prefetch == "off":
            return False
        if self.prefetch == "on" or x.device.type != "cuda":
            return self.prefetch == "on"
        unused = torch.cuda.memory_reserved(x.device) - torch.cuda.memory_allocated(x.device)
        return (
            unused + torch.cuda.mem_get_info(x.device)[0]
            > (SPARE_FOR_PREFETCH + overlap * SPARE_FOR_OVERLAP) * x.nbytes
        )


SPARE_FOR_PREFETCH = 4  # of a layer's input: the fetched one, and three in which attention backward grows
SPARE_FOR_OVERLAP = 3  # what one more stage takes: 2, with K and V of another block 2.5
_chain = Chain()


class UPipeLayerFunction(torch.autograd.Function):
    """``apply(grad_enabled, call, policy, x, *call.parameters())`` -> y [s/TP or s, b, hidden]."""

    @staticmethod
    def forward(
        ctx: Any, grad_enabled: bool, call: LayerCall, policy: Policy, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        # Grad mode is off in here whatever the caller's is, hence the argument.
        if not grad_enabled:
            return call.finish(x, call.attend(x))
        waiting = Waiting(call, policy.store)
        linked = _chain.join(waiting, x, policy.checkpoint_every)
        if not linked:
            waiting.keep_input(x)  # copies to the host start early
        kept = call.attend(x)
        if policy.keep_attention:
            waiting.keep_attention(kept)
        y = call.finish(x, kept)
        waiting.input_copied()
        if policy.frees_input and not linked:
            torch.ops.inductor.resize_storage_bytes_(x, 0)  # an operation, so that LiveBytes sees it
        _chain.ran(waiting, y)
        ctx.waiting, ctx.policy = waiting, policy
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        waiting: Waiting = ctx.waiting
        call: LayerCall = waiting.steps
        _, _, _, needs_x, *needs = ctx.needs_input_grad
        call.before_backward(dy.nbytes)
        # the same memory serves for the gradient of the hidden state, if this node alone holds it
        alone = dy.is_contiguous() and held_alone() == holders(dy)
        dhidden = dy if alone else dy.clone(memory_format=torch.contiguous_format)
        del dy
        x = waiting.input()
        kept = waiting.attention(x)
        wanted = call.split_needs(needs, needs_x)
        dproj_bias, dmlp = call.second_half_gradient(x, kept, dhidden, wanted)
        if ctx.policy.prefetches(x, call.attention.plan.overlap):
            waiting.prefetch_before()
        attention = attention_backward(
            call.attention.gather(dhidden),
            call.attention_input(x, backward=wanted.attention.qkv),
            kept,
            call.attention.weights(),
            call.attention.elementwise,
            call.attention.plan,
            wanted.attention,
            call.attention.segments,
        )
        waiting.release()
        dx, dnorm = call.input_gradient(x, dhidden, attention.x, wanted.norm)
        weights = (attention.qkv, attention.qkv_bias, attention.proj, attention.sinks)
        dx = dx if needs_x else None
        return None, None, None, dx, *dnorm, *weights, *attention.elementwise, dproj_bias, *dmlp
