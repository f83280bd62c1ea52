"""A transformer layer that Megatron builds from one spec object, whatever its flags."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_submodules,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_upipe.errors import UPipeError
from megatron_upipe.layers.spec import with_upipe


class UPipeTransformerLayer(TransformerLayer):
    """Megatron's TransformerLayer with UPipe self-attention.

    A spec object is written before the configuration is known, so the layer takes the submodules that Megatron would
    have chosen from ``config``. All layers are of one kind.
    """

    def __init__(self, config: TransformerConfig, submodules: Any = None, **kwargs: Any) -> None:
        super().__init__(config=config, submodules=upipe_submodules(config), **kwargs)


def upipe_submodules(config: TransformerConfig) -> TransformerLayerSubmodules:
    """Megatron's submodules for ``config`` with UPipe self-attention. Raises UPipeError where layers differ."""
    pattern = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [config.moe_layer_freq]
    if config.num_moe_experts is not None and set(pattern) != {1}:
        raise UPipeError(
            f"--moe-layer-freq {config.moe_layer_freq} mixes dense and expert layers, which one layer spec cannot say; "
            "use a spec made by with_upipe from Megatron's block spec"
        )
    common = dict(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        qk_l2_norm=config.qk_l2_norm,
    )
    if config.transformer_impl == "transformer_engine":
        return with_upipe(get_gpt_layer_with_transformer_engine_submodules(**common))
    return with_upipe(get_gpt_layer_local_submodules(**common, normalization=config.normalization))
