"""Layer specs for ``--spec megatron_upipe.layer_specs NAME``, and ``with_upipe`` for specs of your own."""

from megatron_upipe.errors import UPipeError

try:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_upipe.layers.hybrid import UPipeHybridStack
    from megatron_upipe.layers.spec import with_upipe
    from megatron_upipe.layers.transformer_layer import UPipeTransformerLayer
except ImportError as error:
    # Megatron swallows an ImportError in a spec module and trains the stock model.
    raise UPipeError(f"megatron_upipe.layer_specs cannot be imported: {error}") from error

__all__ = ["upipe_hybrid_stack_spec", "upipe_layer_spec", "upipe_te_layer_spec", "with_upipe"]

upipe_layer_spec = ModuleSpec(module=UPipeTransformerLayer)
"""A transformer layer with UPipe self-attention; settings come from ``config.upipe``."""

upipe_te_layer_spec = ModuleSpec(module=UPipeTransformerLayer, params={"te": True})
"""The same on TransformerEngine's modules: its norms, and its linears, which run by themselves with one
context-parallel rank, FP8 included. Parameters have the names of Megatron's TransformerEngine spec."""

upipe_hybrid_stack_spec = ModuleSpec(module=UPipeHybridStack)
"""A hybrid stack (``pretrain_hybrid.py``) with UPipe's attention and MLP layers; the others are Megatron's."""
