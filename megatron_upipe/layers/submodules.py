"""A layer's submodules with UPipe's self-attention and linears in the places of Megatron's."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_upipe.attention.linears import UPipeColumnParallelLinear, UPipeRowParallelLinear
from megatron_upipe.attention.module import UPipeSelfAttention
from megatron_upipe.errors import UPipeError
from megatron_upipe.precision.te_package import refuses_te

# TransformerEngine's specs fuse norms into the linears behind them; UPipe keeps them apart. In a torch_dist checkpoint
# both write the norm under the fused name.
_INPUT_NORM_KEYS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_MLP_NORM_KEYS = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


class Linears(NamedTuple):
    """Classes of the linears that UPipe reads."""

    column: type = UPipeColumnParallelLinear
    row: type = UPipeRowParallelLinear


def te_linears() -> Linears:
    """TransformerEngine's. Raises UPipeError where it is missing."""
    reason = refuses_te()
    if reason is not None:
        raise UPipeError(
            f"upipe_te_layer_spec needs TransformerEngine: {reason}, or use upipe_layer_spec, with FP8 only above one "
            "context-parallel rank"
        )
    classes = import_module("megatron_upipe.attention.te_linears")
    return Linears(classes.UPipeTEColumnParallelLinear, classes.UPipeTERowParallelLinear)


def replace_submodules(
    spec: TransformerLayerSubmodules,
    kinds: Linears = Linears(),  # noqa: B008
) -> TransformerLayerSubmodules:
    """``spec`` with UPipe's self-attention, and its linears in a dense MLP, where the layer has them.

    Raises UPipeError for other attentions.
    """
    attention = spec.self_attention
    kind = attention.module if isinstance(attention, ModuleSpec) else attention
    if kind is UPipeSelfAttention:
        return spec
    cross = spec.cross_attention
    if cross is not IdentityOp:
        name = getattr(getattr(cross, "module", cross), "__name__", str(cross))
        raise UPipeError(f"{name} as cross-attention is not supported by UPipe; use decoder layers without it")
    changed = {} if kind is IdentityOp else _attention_changes(spec, attention, kind, kinds)
    changed |= _mlp_changes(spec, kinds)
    keys = dict(spec.sharded_state_dict_keys_map)
    if "input_layernorm" in changed:
        keys |= _INPUT_NORM_KEYS
    if "pre_mlp_layernorm" in changed:
        keys |= _MLP_NORM_KEYS
    return replace(spec, **changed, sharded_state_dict_keys_map=keys)


def _attention_changes(spec: TransformerLayerSubmodules, attention: Any, kind: Any, kinds: Linears) -> dict[str, Any]:
    if kind is not SelfAttention or not isinstance(attention, ModuleSpec):
        name = getattr(kind, "__name__", str(kind))
        raise UPipeError(f"{name} is not supported by UPipe; use Megatron's SelfAttention (multi-head or grouped)")
    linears = {"linear_qkv": kinds.column, "linear_proj": kinds.row}
    upipe = ModuleSpec(
        module=UPipeSelfAttention,
        params=dict(attention.params),
        submodules=replace(attention.submodules, **linears),
        metainfo=dict(attention.metainfo),
    )
    changes: dict[str, Any] = {"self_attention": upipe}
    if spec.input_layernorm is IdentityOp:
        changes["input_layernorm"] = _fused_norm(attention.submodules.linear_qkv, "linear_qkv")
    return changes


def _mlp_changes(spec: TransformerLayerSubmodules, kinds: Linears) -> dict[str, Any]:
    dense = dense_mlp(spec.mlp)
    if dense is None:
        return {}
    linears = {"linear_fc1": kinds.column, "linear_fc2": kinds.row}
    submodules = replace(dense["submodules"], **linears)
    changes: dict[str, Any] = {"mlp": partial(MLP.as_mlp_submodule, **{**dense, "submodules": submodules})}
    if spec.pre_mlp_layernorm is IdentityOp:
        changes["pre_mlp_layernorm"] = _fused_norm(dense["submodules"].linear_fc1, "linear_fc1")
    return changes


def dense_mlp(mlp: Any) -> dict[str, Any] | None:
    """The arguments of a dense MLP's spec, in either of the ways Megatron writes it; None for another MLP."""
    if isinstance(mlp, ModuleSpec):
        return {**mlp.params, "submodules": mlp.submodules} if mlp.module is MLP else None
    if isinstance(mlp, partial) and mlp.func == MLP.as_mlp_submodule and not mlp.args:
        return mlp.keywords
    return None


def _fused_norm(linear: Any, place: str) -> Any:
    """The norm that ``linear`` contains in a spec without a norm before it."""
    name = getattr(linear, "__name__", str(linear))
    if "LayerNorm" not in name:
        raise UPipeError(f"the spec has no norm before {place}, neither of its own nor in it ({name}); give it one")
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm
