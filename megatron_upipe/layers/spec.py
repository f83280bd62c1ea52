"""``with_upipe``: any stock Megatron spec with its self-attention replaced by UPipe's."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import singledispatch
from typing import Any

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_upipe.attention.module import (
    UPipeColumnParallelLinear,
    UPipeRowParallelLinear,
    UPipeSelfAttention,
)
from megatron_upipe.errors import UPipeError

# TransformerEngine's specs fuse the input norm into linear_qkv; UPipe keeps them apart. In a torch_dist checkpoint both
# write the norm under the fused name.
_INPUT_NORM_KEYS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}


@singledispatch
def with_upipe(spec: Any) -> Any:
    """``spec`` with UPipe self-attention; the argument is not changed.

    Takes what Megatron's spec functions return: a layer (ModuleSpec), a block (TransformerBlockSubmodules, or a
    ModuleSpec of one), or a layer's submodules; local or TransformerEngine, dense or mixture of experts. Raises
    UPipeError for another kind of attention or spec.
    """
    raise UPipeError(f"with_upipe takes a Megatron layer or block spec, not a {type(spec).__name__}")


@with_upipe.register
def _(spec: ModuleSpec) -> ModuleSpec:
    if spec.submodules is None:
        raise UPipeError(f"with_upipe needs a spec with submodules; the one of {spec.module.__name__} has none")
    changed = copy.copy(spec)
    changed.submodules = with_upipe(spec.submodules)
    return changed


@with_upipe.register
def _(spec: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    return replace(spec, layer_specs=[with_upipe(layer) for layer in spec.layer_specs])


@with_upipe.register
def _(spec: TransformerLayerSubmodules) -> TransformerLayerSubmodules:
    attention = spec.self_attention
    kind = attention.module if isinstance(attention, ModuleSpec) else attention
    if kind is UPipeSelfAttention:
        return spec
    cross = spec.cross_attention
    if cross is not IdentityOp:
        name = getattr(getattr(cross, "module", cross), "__name__", str(cross))
        raise UPipeError(f"{name} as cross-attention is not supported by UPipe; use decoder layers without it")
    if kind is not SelfAttention or not isinstance(attention, ModuleSpec):
        name = getattr(kind, "__name__", str(kind))
        raise UPipeError(f"{name} is not supported by UPipe; use Megatron's SelfAttention (multi-head or grouped)")
    linears = {"linear_qkv": UPipeColumnParallelLinear, "linear_proj": UPipeRowParallelLinear}
    upipe = ModuleSpec(
        module=UPipeSelfAttention,
        params=dict(attention.params),
        submodules=replace(attention.submodules, **linears),
        metainfo=dict(attention.metainfo),
    )
    if spec.input_layernorm is not IdentityOp:
        return replace(spec, self_attention=upipe)
    return replace(
        spec,
        input_layernorm=_fused_norm(attention.submodules.linear_qkv),
        self_attention=upipe,
        sharded_state_dict_keys_map={**spec.sharded_state_dict_keys_map, **_INPUT_NORM_KEYS},
    )


def _fused_norm(linear_qkv: Any) -> Any:
    """The norm that ``linear_qkv`` contains in a spec without an input norm."""
    name = getattr(linear_qkv, "__name__", str(linear_qkv))
    if "LayerNorm" not in name:
        raise UPipeError(f"the spec has no input norm, neither of its own nor in linear_qkv ({name}); give it one")
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm
