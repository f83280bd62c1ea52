"""Hybrid models on a CPU: Megatron has only TransformerEngine's layers for them."""

from typing import Any

from megatron_upipe.integration.symbols import Replacement


def _local_stack(original: Any) -> Any:
    from megatron.core.models.hybrid.hybrid_block import HybridStack
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_upipe.layers.local_hybrid import local_hybrid_submodules

    # RMSNorm or LayerNorm: on a CPU one class is both
    return ModuleSpec(module=HybridStack, submodules=local_hybrid_submodules("RMSNorm"))


def _torch_norm(original: Any) -> Any:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return WrappedTorchNorm


def replacements() -> list[Replacement]:
    why = "Megatron's hybrid models are written for TransformerEngine only"
    return [
        Replacement("megatron.core.models.hybrid.hybrid_block:TENorm", _torch_norm, why),
        Replacement("megatron.core.models.hybrid.hybrid_layer_specs:hybrid_stack_spec", _local_stack, why),
        Replacement("megatron.training.models.hybrid:default_hybrid_stack_spec", _local_stack, why),
    ]
