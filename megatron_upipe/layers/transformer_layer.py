"""Megatron's TransformerLayer with UPipe self-attention, computed as one autograd node."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from inspect import signature
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_submodules,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron_upipe.attention.elementwise import apply_norm
from megatron_upipe.attention.linears import given
from megatron_upipe.attention.module import refuse_arguments
from megatron_upipe.checks import has_experts
from megatron_upipe.config import UPipeConfig, keeps_attention
from megatron_upipe.layers.function import LayerCall, Policy, UPipeLayerFunction
from megatron_upipe.layers.mlp import AnyBackward, Around, DenseBackward, DenseForward, is_dense, mlp_parameters
from megatron_upipe.layers.submodules import Linears, replace_submodules, te_linears
from megatron_upipe.layers.tiles import Tiles
from megatron_upipe.memory.host_store import host_store

# since megatron-core 0.19, to balance experts over each sample of a packed micro-batch
_MLP_KNOWS_DOCUMENTS = "packed_seq_params" in signature(TransformerLayer._forward_mlp).parameters


class UPipeTransformerLayer(TransformerLayer):
    """Megatron's layer, same parameters and results; ``config.upipe`` says what waits for backward, and where.

    A spec object is written before the configuration is known: without ``submodules`` the layer takes those that
    Megatron would have chosen from ``config`` for it, dense or experts; with ``te``, those of TransformerEngine. With
    one context-parallel rank it is Megatron's layer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any = None,
        layer_number: int = 1,
        *,
        vp_stage: int | None = None,
        te: bool = False,
        pg_collection: Any = None,
        add_layer_offset: bool = True,
        pp_layer_offset: int | None = None,
        **kwargs: Any,
    ) -> None:
        pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        stage = pg_collection.pp.rank() if config.pipeline_model_parallel_size > 1 else 0
        first = get_transformer_layer_offset(config, vp_stage, stage) if add_layer_offset else pp_layer_offset
        index = layer_number - 1 + (first if add_layer_offset else 0)
        super().__init__(
            config=config,
            submodules=submodules or upipe_submodules(config, index, te),
            layer_number=layer_number,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
            add_layer_offset=add_layer_offset,
            pp_layer_offset=pp_layer_offset,
            **kwargs,
        )
        self.upipe: UPipeConfig = self.self_attention.upipe
        self.keeps = True  # a hybrid stack, which counts its layers by itself, says which ones keep
        if add_layer_offset:
            layers = get_num_layers_to_build(config, vp_stage, stage)
            self.keeps = keeps_attention(self.upipe.keep_attention, config.num_layers, first, layers, index)
        receives = stage > 0 or bool(vp_stage)
        self.before_backward: Callable[[int], None] = lambda size: None
        self._instead: Callable[[], Tensor] | None = None
        self._frees_input = receives and index == first and self.upipe.offload == "host"

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        rotary_pos_emb: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As Megatron's, [s/TP or s, b, hidden]; collective over the tensor- and context-parallel groups."""
        if self._instead is not None:
            run, self._instead = self._instead, None
            return run(), None
        if not self.self_attention.context_parallel:
            others |= dict(context=context, context_mask=context_mask, rotary_pos_emb=rotary_pos_emb)
            return super().forward(hidden_states, attention_mask=attention_mask, **others)
        padding_mask = others.pop("padding_mask", None)
        packed = others.pop("packed_seq_params", None)
        inference = others.pop("inference_context", None) or others.pop("inference_params", None)
        others.pop("inference_params", None)
        refuse_arguments(attention_mask, inference, {**others, "context": context, "context_mask": context_mask})
        call = self._call(hidden_states, rotary_pos_emb, padding_mask, packed)
        policy = Policy(
            store=host_store(hidden_states.device) if self.upipe.offload == "host" else None,
            keep_attention=self.keeps,
            checkpoint_every=self.upipe.checkpoint_every,
            prefetch=self.upipe.prefetch,
            frees_input=self._frees_input,
        )
        y = UPipeLayerFunction.apply(torch.is_grad_enabled(), call, policy, hidden_states, *call.parameters())
        # pipeline stages free what they have sent, which must not be a view; without gradients it may be one
        return make_viewless_tensor(y, requires_grad=y.requires_grad, keep_graph=True), context

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Keys of the stock layer.

        Where that has the norms inside the linears behind them, TransformerEngine's state of a norm by itself, which
        has nothing in it, has no key.
        """
        state = super().sharded_state_dict(*args, **kwargs)
        for name, entry in state.items():
            if getattr(entry, "key", "").endswith(".layer_norm__extra_state"):
                state[name] = LocalNonpersistentObject(entry.data)
        return state

    def _call(self, x: Tensor, rotary_pos_emb: Any, padding_mask: Tensor | None, packed: Any) -> LayerCall:
        attention = self.self_attention.call(x, rotary_pos_emb, packed)
        tokens, micro_batch, _ = x.shape
        shards = self.self_attention.shards
        unit = attention.plan.precision.alignment
        norm_tiles = Tiles.of(tokens, self.upipe.mlp_tile_tokens, micro_batch, shards, unit)
        if is_dense(self.mlp):
            tiles = norm_tiles
            fuse = self.config.gradient_accumulation_fusion
            around = Around(attention.plan.precision, attention.gather, attention.reduce)
            second_half = partial(DenseForward, self, around)
            backward = partial(DenseBackward, self, around, fuse=fuse)
        else:
            alone = isinstance(self.mlp, IdentityOp)  # hybrid models have attention and MLP in layers of their own
            forward = _same if alone else partial(self._forward_experts, padding_mask, packed)
            second_half = lambda: forward  # noqa: E731
            tiles = norm_tiles if alone else Tiles(tokens, tokens, shards)
            backward = partial(AnyBackward, self, forward)
        return LayerCall(
            attention=attention,
            norm=partial(apply_norm, self.input_layernorm),
            norm_parameters=tuple(self.input_layernorm.parameters()),
            proj_bias=given(self.self_attention.linear_proj.bias),
            add_attention=self._add_attention,
            second_half=second_half,
            second_half_backward=backward,
            mlp_parameters=tuple(mlp_parameters(self)),
            tiles=tiles,
            norm_tiles=norm_tiles,
            again=self._again,
            before_backward=self.before_backward,
        )

    def _again(self, run: Callable[[], Tensor], x: Tensor) -> Tensor:
        """``run`` in the place of a forward of ``x``, inside ``__call__``: its hooks bring the parameters there."""
        self._instead = run
        try:
            with torch.no_grad():
                y, _ = self(hidden_states=x)
        finally:
            self._instead = None
        return y

    def _forward_experts(self, padding_mask: Tensor | None, packed: Any, hidden: Tensor) -> Tensor:
        """Megatron's own second half; in backward, too, in the precision that Megatron's block gives its layers."""
        told = {"packed_seq_params": packed} if _MLP_KNOWS_DOCUMENTS else {}
        with self._quantization_context():
            return self._forward_mlp(hidden, padding_mask=padding_mask, **told)

    def _quantization_context(self) -> AbstractContextManager:
        return get_fp8_context(self.config, self.layer_number - 1) if self.config.fp8 else nullcontext()

    def _add_attention(self, projected: Tensor, residual: Tensor) -> Tensor:
        """Output bias and residual connection."""
        add = self.self_attn_bda(self.training, self.config.bias_dropout_fusion)
        return add((projected, given(self.self_attention.linear_proj.bias)), residual, self.hidden_dropout)


def _same(hidden: Tensor) -> Tensor:
    return hidden


def upipe_submodules(config: TransformerConfig, index: int, te: bool = False) -> TransformerLayerSubmodules:
    """Megatron's submodules for layer ``index`` of ``config``, from 0, with UPipe self-attention.

    ``te``: TransformerEngine's modules, its linears included. Raises UPipeError where those are missing.
    """
    linears = te_linears() if te else Linears()
    experts = config.num_moe_experts
    common = dict(
        num_experts=experts if has_experts(index, experts, config.moe_layer_freq) else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        qk_l2_norm=config.qk_l2_norm,
    )
    if te or config.transformer_impl == "transformer_engine":
        return replace_submodules(get_gpt_layer_with_transformer_engine_submodules(**common), linears)
    return replace_submodules(get_gpt_layer_local_submodules(**common, normalization=config.normalization))
