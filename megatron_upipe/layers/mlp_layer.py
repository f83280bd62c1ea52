"""A layer that is an MLP only, as hybrid models have: one autograd node that keeps its input and runs in tiles.

Megatron's keeps its intermediates, [s, b, ffn] several times over, for backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.utils import make_viewless_tensor
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_upipe.attention.module import refuse_arguments
from megatron_upipe.attention.tensor_parallel import tensor_parallel
from megatron_upipe.config import UPipeConfig
from megatron_upipe.errors import UPipeError
from megatron_upipe.layers.chain import Waiting
from megatron_upipe.layers.holding import held_alone, holders
from megatron_upipe.layers.mlp import Around, DenseBackward, DenseForward, is_dense, mlp_parameters
from megatron_upipe.layers.tiles import Tiles
from megatron_upipe.memory.host_store import host_store
from megatron_upipe.precision.recipes import layer_recipe
from megatron_upipe.precision.select import select_precision


@dataclass(frozen=True)
class MLPCall:
    """One forward call of an MLP layer and its backward, in ``tiles``."""

    forward: Callable[[], DenseForward]
    backward: Callable[[list[bool]], DenseBackward]
    parameters: tuple[Tensor, ...]
    tiles: Tiles
    before_backward: Callable[[int], None]


class UPipeMLPFunction(torch.autograd.Function):
    """``apply(grad_enabled, call, store, x, *call.parameters)`` -> y [s/TP or s, b, hidden]; without a ``store`` the
    input waits on the device."""

    @staticmethod
    def forward(ctx: Any, grad_enabled: bool, call: MLPCall, store: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        waiting = Waiting(None, store)
        if grad_enabled:
            waiting.keep_input(x)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        mlp = call.forward()
        for rows in call.tiles.rows():
            y[rows] = mlp(x[rows])
        waiting.input_copied()
        ctx.waiting, ctx.call = waiting, call
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        call: MLPCall = ctx.call
        _, _, _, needs_x, *needs = ctx.needs_input_grad
        call.before_backward(dy.nbytes)
        # the same memory serves for the gradient of the input, if this node alone holds it
        alone = dy.is_contiguous() and held_alone() == holders(dy)
        dx = dy if alone else dy.clone(memory_format=torch.contiguous_format)
        del dy
        x = ctx.waiting.input()
        mlp = call.backward(needs)
        for rows in call.tiles.rows():
            dx[rows] = mlp.tile(x[rows], dx[rows])
        ctx.waiting.release()
        return None, None, None, dx if needs_x else None, *mlp.result()


class UPipeMLPLayer(MLPLayer):
    """Megatron's MLP layer, same parameters and results. With one context-parallel rank it is Megatron's."""

    def __init__(self, config: Any, submodules: Any, **kwargs: Any) -> None:
        super().__init__(config=config, submodules=submodules, **kwargs)
        if not isinstance(self.self_attention, IdentityOp) or not is_dense(self.mlp):
            raise UPipeError("UPipe's MLP layer takes a dense MLP and nothing else; make its spec by with_upipe")
        self.upipe: UPipeConfig = getattr(config, "upipe", None) or UPipeConfig()
        context = getattr(self.pg_collection, "cp", None) or parallel_state.get_context_parallel_group()
        self._context_ranks = context.size()
        self.before_backward: Callable[[int], None] = lambda size: None

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As Megatron's, [s/TP or s, b, hidden]; collective over the tensor-parallel group."""
        if self._context_ranks == 1:
            return super().forward(hidden_states, attention_mask=attention_mask, **others)
        inference = others.pop("inference_context", None) or others.pop("inference_params", None)
        unused = ("rotary_pos_emb", "packed_seq_params", "padding_mask", "inference_params")  # by a dense MLP
        others = {name: value for name, value in others.items() if name not in unused}
        refuse_arguments(attention_mask, inference, others)
        call = self._call(hidden_states)
        store = host_store(hidden_states.device) if self.upipe.offload == "host" else None
        y = UPipeMLPFunction.apply(torch.is_grad_enabled(), call, store, hidden_states, *call.parameters)
        return make_viewless_tensor(y, requires_grad=y.requires_grad, keep_graph=True), None

    def _call(self, x: Tensor) -> MLPCall:
        ranks = self.config.tensor_model_parallel_size
        shards = ranks if self.config.sequence_parallel else 1
        precision = select_precision(layer_recipe(self.config, self.layer_number), x.device, x.dtype)
        around = Around(precision, *tensor_parallel(self.pg_collection.tp, ranks, shards > 1))
        tokens, micro_batch, _ = x.shape
        return MLPCall(
            forward=partial(DenseForward, self, around),
            backward=partial(DenseBackward, self, around, fuse=self.config.gradient_accumulation_fusion),
            parameters=tuple(mlp_parameters(self)),
            tiles=Tiles.of(tokens, self.upipe.mlp_tile_tokens, micro_batch, shards, precision.alignment),
            before_backward=self.before_backward,
        )
