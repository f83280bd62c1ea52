"""Megatron's HybridStack (``pretrain_hybrid.py``, ``HybridModel``) with UPipe's attention and MLP layers."""

from __future__ import annotations

from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules

from megatron_upipe.checks import check_hybrid_policy
from megatron_upipe.config import UPipeConfig, keeps_attention
from megatron_upipe.layers.local_hybrid import local_hybrid_submodules
from megatron_upipe.layers.spec import with_upipe
from megatron_upipe.layers.transformer_layer import UPipeTransformerLayer


class UPipeHybridStack(HybridStack):
    """Megatron's stack; a spec object is written before the configuration is known, hence without ``submodules`` those
    that Megatron has for ``config``. Mamba, mixture-of-experts and other layers stay Megatron's."""

    def __init__(self, config: Any, submodules: HybridStackSubmodules | None = None, **kwargs: Any) -> None:
        super().__init__(config, submodules or upipe_hybrid_submodules(config), **kwargs)
        upipe: UPipeConfig = getattr(config, "upipe", None) or UPipeConfig()
        check_hybrid_policy(upipe, config.pipeline_model_parallel_size)
        attention = [layer for layer in self.layers if isinstance(layer, UPipeTransformerLayer)]
        for index, layer in enumerate(attention):
            layer.keeps = keeps_attention(upipe.keep_attention, len(attention), 0, len(attention), index)


def upipe_hybrid_submodules(config: Any) -> HybridStackSubmodules:
    """Megatron's submodules of a hybrid stack, local or TransformerEngine, with UPipe's layers."""
    if config.transformer_impl == "local":
        return with_upipe(local_hybrid_submodules(config.normalization, config.qk_layernorm, config.qk_l2_norm))
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    return with_upipe(hybrid_stack_spec.submodules)
