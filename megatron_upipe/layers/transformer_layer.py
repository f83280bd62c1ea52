"""A transformer layer that Megatron builds from one spec object, whatever its flags."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_submodules,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_upipe.attention.module import (
    UPipeColumnParallelLinear,
    UPipeRowParallelLinear,
    UPipeSelfAttention,
)
from megatron_upipe.errors import UPipeError

# TransformerEngine fuses the input norm into linear_qkv; UPipe keeps them apart. The map makes both write one key.
_INPUT_NORM_KEYS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}


class UPipeTransformerLayer(TransformerLayer):
    """Megatron's TransformerLayer with UPipe self-attention.

    The submodules are those that Megatron would have chosen from ``config``, self-attention replaced; a spec is written
    before the configuration is known.
    """

    def __init__(self, config: TransformerConfig, submodules: Any = None, **kwargs: Any) -> None:
        super().__init__(config=config, submodules=upipe_submodules(config), **kwargs)


def upipe_submodules(config: TransformerConfig) -> TransformerLayerSubmodules:
    """Megatron's submodules for ``config`` with UPipe self-attention; UPipeError for other kinds of attention."""
    stock = _stock_submodules(config)
    attention = stock.self_attention
    if attention.module is not SelfAttention:
        raise UPipeError(f"{attention.module.__name__} is not supported by UPipe; use multi-head or grouped attention")
    linears = {"linear_qkv": UPipeColumnParallelLinear, "linear_proj": UPipeRowParallelLinear}
    changed: dict[str, Any] = {}
    if config.transformer_impl == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        changed["input_layernorm"] = TENorm
        changed["sharded_state_dict_keys_map"] = {**stock.sharded_state_dict_keys_map, **_INPUT_NORM_KEYS}
    return replace(
        stock,
        self_attention=ModuleSpec(
            module=UPipeSelfAttention,
            params=attention.params,
            submodules=replace(attention.submodules, **linears),
            metainfo=attention.metainfo,
        ),
        **changed,
    )


def _stock_submodules(config: TransformerConfig) -> TransformerLayerSubmodules:
    common = dict(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        qk_l2_norm=config.qk_l2_norm,
    )
    if config.transformer_impl == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_submodules(**common)
    return get_gpt_layer_local_submodules(**common, normalization=config.normalization)
