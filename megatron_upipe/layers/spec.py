"""``with_upipe``: any stock Megatron spec with UPipe's layer and self-attention."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import singledispatch
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_upipe.errors import UPipeError
from megatron_upipe.layers.submodules import replace_submodules
from megatron_upipe.layers.transformer_layer import UPipeTransformerLayer


@singledispatch
def with_upipe(spec: Any) -> Any:
    """``spec`` with UPipe self-attention; the argument is not changed.

    Takes what Megatron's spec functions return: a layer (ModuleSpec), a block (TransformerBlockSubmodules, or a
    ModuleSpec of one), or a layer's submodules; local or TransformerEngine, dense or mixture of experts. Raises
    UPipeError for another kind of attention or spec. A layer of Megatron's becomes UPipe's; a subclass of yours keeps
    its own forward and gets UPipe's attention only.
    """
    raise UPipeError(f"with_upipe takes a Megatron layer or block spec, not a {type(spec).__name__}")


@with_upipe.register
def _(spec: ModuleSpec) -> ModuleSpec:
    if spec.submodules is None:
        raise UPipeError(f"with_upipe needs a spec with submodules; the one of {spec.module.__name__} has none")
    changed = copy.copy(spec)
    if spec.module is TransformerLayer:
        changed.module = UPipeTransformerLayer
    changed.submodules = with_upipe(spec.submodules)
    return changed


@with_upipe.register
def _(spec: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    return replace(spec, layer_specs=[with_upipe(layer) for layer in spec.layer_specs])


@with_upipe.register
def _(spec: TransformerLayerSubmodules) -> TransformerLayerSubmodules:
    return replace_submodules(spec)
