"""``with_upipe``: any stock Megatron spec with UPipe's layer and self-attention."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import singledispatch
from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_upipe.errors import UPipeError
from megatron_upipe.layers.mlp_layer import UPipeMLPLayer
from megatron_upipe.layers.submodules import dense_mlp, replace_submodules
from megatron_upipe.layers.transformer_layer import UPipeTransformerLayer


@singledispatch
def with_upipe(spec: Any) -> Any:
    """``spec`` with UPipe self-attention; the argument is not changed.

    Takes what Megatron's spec functions return: a layer (ModuleSpec), a block (TransformerBlockSubmodules, or a
    ModuleSpec of one), a hybrid stack, or the submodules of one of these; local or TransformerEngine, dense or mixture
    of experts. Raises UPipeError for another kind of attention or spec. A layer of Megatron's becomes UPipe's; a
    subclass of yours keeps its own forward and gets UPipe's attention only.
    """
    raise UPipeError(f"with_upipe takes a Megatron layer or block spec, not a {type(spec).__name__}")


@with_upipe.register
def _(spec: ModuleSpec) -> ModuleSpec:
    if spec.submodules is None:
        raise UPipeError(f"with_upipe needs a spec with submodules; the one of {spec.module.__name__} has none")
    changed = copy.copy(spec)
    if spec.module is TransformerLayer and spec.submodules.self_attention is not IdentityOp:
        changed.module = UPipeTransformerLayer
    elif spec.module is MLPLayer and dense_mlp(spec.submodules.mlp) is not None:
        changed.module = UPipeMLPLayer
    changed.submodules = with_upipe(spec.submodules)
    return changed


@with_upipe.register
def _(spec: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    return replace(spec, layer_specs=[with_upipe(layer) for layer in spec.layer_specs])


@with_upipe.register
def _(spec: HybridStackSubmodules) -> HybridStackSubmodules:
    return replace(spec, **{name: with_upipe(getattr(spec, name)) for name in ("attention_layer", "mlp_layer")})


@with_upipe.register
def _(spec: TransformerLayerSubmodules) -> TransformerLayerSubmodules:
    return replace_submodules(spec)
