"""UPipe in Megatron's training loop: settings from flags, no silent stock model."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

from megatron_upipe.config import EXACT_ROPE_FROM, RotarySettings, UPipeConfig
from megatron_upipe.errors import UPipeError
from megatron_upipe.integration.host_memory import check_host_memory
from megatron_upipe.integration.overlap import resolve_overlap
from megatron_upipe.integration.symbols import Replacement

SPEC = "megatron_upipe.layer_specs"

# attribute of the arguments -> flag; without the spec they would do nothing
UPIPE_FLAGS = {
    "upipe_heads_per_stage": "--upipe-heads-per-stage",
    "upipe_attention_backend": "--upipe-attention-backend",
    "upipe_fp8_attention": "--upipe-fp8-attention",
    "upipe_overlap": "--upipe-overlap",
    "upipe_exchange": "--upipe-exchange",
    "upipe_rope": "--upipe-rope",
    "upipe_keep_attention": "--upipe-keep-attention",
    "upipe_offload": "--upipe-offload",
    "upipe_prefetch": "--upipe-prefetch",
    "upipe_checkpoint_every": "--upipe-checkpoint-every",
    "upipe_mlp_tile_tokens": "--upipe-mlp-tile-tokens",
    "upipe_loss_tile_tokens": "--upipe-loss-tile-tokens",
}
# these are about layers that UPipe computes, which it does with several context-parallel ranks only
LAYER_FLAGS = [name for name in UPIPE_FLAGS if name not in ("upipe_rope", "upipe_loss_tile_tokens")]
ATTENTION_FLAGS = (
    "upipe_heads_per_stage",
    "upipe_attention_backend",
    "upipe_fp8_attention",
    "upipe_overlap",
    "upipe_exchange",
)
# attributes that are UPipeConfig's as they are
SETTINGS = (
    "attention_backend",
    "fp8_attention",
    "exchange",
    "offload",
    "prefetch",
    "checkpoint_every",
    "mlp_tile_tokens",
)


def wants_upipe(args: Namespace) -> bool:
    """Whether ``--spec`` leads to UPipe attention: this package's specs, or one made by ``with_upipe`` elsewhere.

    A function that makes a spec counts if its module uses this package.
    """
    if not args.spec or len(args.spec) != 2:
        return False
    module, spec = _spec(args)
    if inspect.isfunction(spec):
        return any(_is_ours(value) for value in vars(module).values())
    return _has_upipe(spec)


def builds_hybrid(args: Namespace) -> bool:
    """Whether ``--spec`` is that of a hybrid stack."""
    from megatron.core.models.hybrid.hybrid_block import HybridStack

    kind = getattr(_spec(args)[1], "module", None)
    return isinstance(kind, type) and issubclass(kind, HybridStack)


def _spec(args: Namespace) -> tuple[ModuleType, Any]:
    """The module of ``--spec``, and what its second word names there."""
    module = sys.modules.get(args.spec[0]) or importlib.import_module(args.spec[0])
    return module, vars(module).get(args.spec[1])


def _is_ours(value: Any) -> bool:
    name = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
    return isinstance(name, str) and (name + ".").startswith("megatron_upipe.")


def _has_upipe(spec: Any) -> bool:
    """Whether a class of this package stands anywhere in a spec."""
    if isinstance(spec, type):
        return _is_ours(spec)
    if isinstance(spec, (list, tuple)):
        return any(map(_has_upipe, spec))
    if is_dataclass(spec):
        return any(_has_upipe(getattr(spec, f.name)) for f in fields(spec))
    return False


def masks_documents(args: Namespace) -> bool:
    """Whether ``--dataloader-inter-document-masking`` is on; megatron-core 0.18 has no such flag."""
    return getattr(args, "dataloader_inter_document_masking", False)


def say(sentence: str) -> None:
    """Prints on rank 0."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"megatron_upipe: {sentence}", flush=True)


def keep_attention(args: Namespace) -> int | None:
    """Layers that keep their attention; None is all. Raises UPipeError."""
    given = args.upipe_keep_attention
    if given is None or given == "all":
        return None
    if not given.isdecimal():
        most = f"{args.num_layers} (or all)" if args.num_layers else "all"
        raise UPipeError(f"--upipe-keep-attention {given} is not a number of layers; use 0 to {most}")
    return int(given)


def loss_tile_tokens(args: Namespace) -> int:
    """As given; without the flag UPipe's default under context parallelism, unless Megatron's fused loss is wanted."""
    if args.upipe_loss_tile_tokens is not None:
        return args.upipe_loss_tile_tokens
    stock = args.context_parallel_size == 1 or args.cross_entropy_loss_fusion or args.defer_embedding_wgrad_compute
    return 0 if stock else UPipeConfig.loss_tile_tokens


def upipe_config(args: Namespace) -> UPipeConfig:
    """The plug-in's settings from parsed arguments. Raises UPipeError."""
    rotary = None
    if args.position_embedding_type == "rope":
        rotary = RotarySettings(
            base=args.rotary_base,
            percent=args.rotary_percent,
            llama3_scaling_factor=8.0 if args.use_rope_scaling else None,  # Megatron ignores --rope-scaling-factor
            interpolation_factor=args.rotary_seq_len_interpolation_factor,
        )
    elif args.upipe_rope == "exact":
        raise UPipeError(
            f"--upipe-rope exact does not know --position-embedding-type {args.position_embedding_type}; use stock"
        )
    long = (args.seq_length or 0) >= EXACT_ROPE_FROM
    rope = args.upipe_rope or ("exact" if long and rotary is not None else "stock")
    given = {name: getattr(args, f"upipe_{name}") for name in SETTINGS if getattr(args, f"upipe_{name}") is not None}
    return UPipeConfig(
        heads_per_stage=args.upipe_heads_per_stage,
        overlap="on" if args.upipe_overlap == "on" else "off",
        rope=rope,
        rotary=rotary,
        keep_attention=keep_attention(args),
        loss_tile_tokens=loss_tile_tokens(args),
        packed_layout="sequence" if masks_documents(args) and not args.sft else "document",
        **given,
    )


def check_layers(args: Namespace, model: list) -> None:
    """Raises UPipeError unless every self-attention is UPipe's, and every layer with one if flags are about them."""
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_upipe.attention.module import UPipeSelfAttention
    from megatron_upipe.layers.transformer_layer import UPipeTransformerLayer

    attentions = [(n, m) for chunk in model for n, m in chunk.named_modules() if isinstance(m, Attention)]
    others = [(name, type(m).__name__) for name, m in attentions if not isinstance(m, UPipeSelfAttention)]
    if others:
        name, kind = others[0]
        raise UPipeError(
            f"--spec asks for UPipe but {len(others)} of {len(attentions)} attention layers are not UPipe, the first "
            f"{name} ({kind}); check the log above for a spec that failed to import"
        )
    given = [
        UPIPE_FLAGS[name] for name in LAYER_FLAGS if name not in ATTENTION_FLAGS and getattr(args, name) is not None
    ]
    layers = [m for chunk in model for m in chunk.modules() if isinstance(m, TransformerLayer)]
    attending = [type(m).__name__ for m in layers if not isinstance(m.self_attention, IdentityOp)]
    foreign = [kind for kind in attending if kind != UPipeTransformerLayer.__name__]
    if given and foreign:
        raise UPipeError(f"{given[0]} needs UPipe's own layer, but the spec builds {foreign[0]}; leave the flag out")


def overlap_exchanges(model: list, on: bool) -> None:
    """In all layers, built before ``--upipe-overlap auto`` was decided."""
    from megatron_upipe.attention.module import UPipeSelfAttention

    for attention in (m for chunk in model for m in chunk.modules() if isinstance(m, UPipeSelfAttention)):
        if attention.context_parallel:
            attention.use_overlap(on)


def _with_upipe_config(original: Callable) -> Callable:
    def core_transformer_config_from_args(args: Namespace, config_class: type | None = None) -> Any:
        config = original(args, config_class)
        if wants_upipe(args):
            config.upipe = upipe_config(args)
        return config

    return core_transformer_config_from_args


def _checked(original: Callable) -> Callable:
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        from megatron_upipe.integration.fsdp_gradients import share_gradients_early

        result = original(*args, **kwargs)
        settings = get_args()
        if wants_upipe(settings):
            check_layers(settings, result[0])
            settings.upipe_overlap = resolve_overlap(settings)
            overlap_exchanges(result[0], settings.upipe_overlap == "on")
            share_gradients_early(result[0])
            if settings.upipe_offload == "host":
                check_host_memory(settings, result[0])
            if settings.context_parallel_size > 1:
                say(f"{upipe_config(settings).describe()}")
        return result

    return setup_model_and_optimizer


def _with_upipe_linears(original: dict[str, set]) -> dict[str, set]:
    """Megatron-FSDP knows from the class's name how a parameter is split over the tensor-parallel group."""
    return {
        **original,
        "column": original["column"] | {"UPipeColumnParallelLinear", "UPipeTEColumnParallelLinear", "SinksOnly"},
        "row": original["row"] | {"UPipeRowParallelLinear", "UPipeTERowParallelLinear"},
    }


def replacements() -> list[Replacement]:
    return [
        Replacement(
            "megatron.core.distributed.fsdp.mcore_fsdp_adapter:FullyShardedDataParallel._MODULE_TYPE_REGISTRY",
            _with_upipe_linears,
            "Megatron-FSDP looks up linears by class name",
        ),
        Replacement(
            "megatron.training.argument_utils:core_transformer_config_from_args",
            _with_upipe_config,
            "hands the plug-in's settings to the layers",
        ),
        Replacement(
            "megatron.training.training:setup_model_and_optimizer",
            _checked,
            "stops a run in which an attention layer is not UPipe (Megatron trains the stock model if a spec fails)",
        ),
    ]
