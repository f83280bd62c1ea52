"""A hybrid stack of Megatron's local layers; Megatron has one for TransformerEngine only. Nothing of UPipe's."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)


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
