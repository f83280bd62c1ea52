"""Megatron's HybridStack (``pretrain_hybrid.py``, ``HybridModel``) with UPipe's attention and MLP layers."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_upipe.config import UPipeConfig, keeps_attention
from megatron_upipe.errors import UPipeError
from megatron_upipe.layers.spec import with_upipe
from megatron_upipe.layers.transformer_layer import UPipeTransformerLayer


class UPipeHybridStack(HybridStack):
    """Megatron's stack; a spec object is written before the configuration is known, hence without ``submodules`` those
    that Megatron has for ``config``. Mamba, mixture-of-experts and other layers stay Megatron's."""

    def __init__(self, config: Any, submodules: HybridStackSubmodules | None = None, **kwargs: Any) -> None:
        super().__init__(config, submodules or upipe_hybrid_submodules(config), **kwargs)
        upipe: UPipeConfig = getattr(config, "upipe", None) or UPipeConfig()
        if upipe.checkpoint_every > 1:
            raise UPipeError(
                f"--upipe-checkpoint-every {upipe.checkpoint_every} runs UPipe layers again one after the other, and a "
                "hybrid model has others between them; use 1"
            )
        if upipe.keep_attention is not None and config.pipeline_model_parallel_size > 1:
            raise UPipeError(
                f"--upipe-keep-attention {upipe.keep_attention} cannot be spread over the pipeline stages of a hybrid "
                "model; use all, or --pipeline-model-parallel-size 1"
            )
        attention = [layer for layer in self.layers if isinstance(layer, UPipeTransformerLayer)]
        for index, layer in enumerate(attention):
            layer.keeps = keeps_attention(upipe.keep_attention, len(attention), 0, len(attention), index)


def upipe_hybrid_submodules(config: Any) -> HybridStackSubmodules:
    """Megatron's submodules of a hybrid stack, local or TransformerEngine, with UPipe's layers."""
    if config.transformer_impl == "local":
        return with_upipe(local_hybrid_submodules(config.normalization, config.qk_layernorm, config.qk_l2_norm))
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    return with_upipe(hybrid_stack_spec.submodules)


def local_hybrid_submodules(
    normalization: str, qk_layernorm: bool = False, qk_l2_norm: bool = False
) -> HybridStackSubmodules:
    """A hybrid stack of Megatron's local layers, for machines without TransformerEngine; Megatron has none.

    Attention, MLP and mixture-of-experts layers; parameters and checkpoint keys are those of Megatron's own spec.
    """
    common = dict(normalization=normalization, qk_layernorm=qk_layernorm, qk_l2_norm=qk_l2_norm)
    dense = get_gpt_layer_local_submodules(**common)
    experts = get_gpt_layer_local_submodules(num_experts=8, **common)  # any number: the configuration has the real one
    attention = ("input_layernorm", "self_attention", "self_attn_bda")
    return HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=_only(dense, *attention)),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=_only(dense, "pre_mlp_layernorm", "mlp", "mlp_bda")),
        moe_layer=ModuleSpec(
            module=MoETransformerLayer, submodules=_only(experts, "pre_mlp_layernorm", "mlp", "mlp_bda")
        ),
    )


def _only(submodules: TransformerLayerSubmodules, *names: str) -> TransformerLayerSubmodules:
    """Those named, with the checkpoint keys of their norms; the others are left out of the layer."""
    kept = {name: getattr(submodules, name) for name in names}
    keys = {old: new for old, new in submodules.sharded_state_dict_keys_map.items() if old.rstrip(".") in names}
    return TransformerLayerSubmodules(**kept, sharded_state_dict_keys_map=keys)
