"""Models from files: Hugging Face's ``config.json``, and text with Megatron-LM's flags. Free of torch."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any

from megatron_upipe.errors import UPipeError
from megatron_upipe.planning.models import ModelShape


def from_hugging_face(path: Path) -> ModelShape:
    """Of a ``config.json``."""
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UPipeError(f"--model {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UPipeError(f"--model {path} is not the config.json of a model")
    kind = config.get("model_type", "llama")
    if kind not in _KINDS:
        raise UPipeError(f"--model {path} is a {kind}; what can be simulated is {', '.join(_KINDS)}")
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return _checked(
            f"--model {path}",
            name=config.get("model_type", path.parent.name),
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            ffn=config.get("moe_intermediate_size") or config["intermediate_size"],
            vocabulary=config["vocab_size"],
            rope_base=config.get("rope_theta") or 10000.0,
            qk_norm="qwen3" in kind,
            experts=config.get("num_local_experts") or config.get("num_experts") or 0,
            experts_per_token=config.get("num_experts_per_tok") or 0,
            tied=bool(config.get("tie_word_embeddings")),
        )
    except KeyError as error:
        raise UPipeError(f"--model {path} has no {error.args[0]}; is it the config.json of a decoder?") from error
    except (TypeError, ZeroDivisionError) as error:
        raise UPipeError(f"--model {path} has a size that is not a whole number above 0: {error}") from error


_KINDS = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Decoders of the one architecture that is simulated: RMSNorm, gated MLP, full attention, RoPE."""


def _checked(where: str, **sizes: Any) -> ModelShape:
    """Raises UPipeError unless sizes are whole numbers above 0 that fit together."""
    shape = ModelShape(**sizes)
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocabulary"):
        value = getattr(shape, name)
        if not isinstance(value, int) or value < 1:
            raise UPipeError(f"{where} has {value!r} for {name}; the least is 1")
    if shape.heads % shape.kv_heads:
        raise UPipeError(f"{where} has {shape.heads} heads for {shape.kv_heads} KV heads; a multiple is needed")
    return shape


def from_megatron(path: Path) -> ModelShape:
    """Of a file that has Megatron-LM's flags anywhere in it, such as a launch script; the last one of a name counts."""
    try:
        text = path.read_text(encoding="utf-8")
        words = shlex.split(text.replace("\\\n", " ").replace("(", " ").replace(")", " "), comments=True)
        # NAME="--flag value ..." is one word
        words = [part for word in words for part in re.sub(r"^\w+\+?=(?=\s*--)", "", word).split()]
    except (OSError, ValueError) as error:
        raise UPipeError(f"--model {path} cannot be read: {error}") from error
    return from_words(words, f"--model {path}", path.stem)


def from_words(words: list[str], where: str, name: str = "model") -> ModelShape:
    """Of a command line with Megatron-LM's flags; ``where`` it came from, for errors. Raises UPipeError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag, number in _NUMBERS.items():
        parser.add_argument(flag, type=number)
    for flag in _SWITCHES:
        parser.add_argument(flag, action="store_true")
    try:
        args, _ = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UPipeError(f"{where}: {error}") from error
    for needed in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        if getattr(args, needed) is None:
            raise UPipeError(f"{where} has no --{needed.replace('_', '-')}; add it")
    if not args.swiglu:
        raise UPipeError(f"{where} has no --swiglu; models with a gated MLP are simulated")
    heads, hidden = args.num_attention_heads, args.hidden_size
    if heads < 1:
        raise UPipeError(f"{where} has --num-attention-heads {heads}; the least is 1")
    ffn = (args.num_experts and args.moe_ffn_hidden_size) or args.ffn_hidden_size
    return _checked(
        where,
        name=name,
        layers=args.num_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=(args.group_query_attention and args.num_query_groups) or heads,
        head_dim=args.kv_channels or hidden // heads,
        ffn=ffn or int(4 * hidden * 2 / 3) // 64 * 64,  # Megatron's default for a gated MLP
        vocabulary=args.vocab_size,
        rope_base=args.rotary_base or 10000.0,
        qk_norm=args.qk_layernorm,
        experts=args.num_experts or 0,
        experts_per_token=(args.moe_router_topk or 2) if args.num_experts else 0,
        tied=not args.untie_embeddings_and_output_weights,
    )


_NUMBERS: dict[str, Any] = {
    "--num-layers": int,
    "--hidden-size": int,
    "--ffn-hidden-size": int,
    "--num-attention-heads": int,
    "--num-query-groups": int,
    "--kv-channels": int,
    "--vocab-size": int,
    "--rotary-base": float,
    "--num-experts": int,
    "--moe-router-topk": int,
    "--moe-ffn-hidden-size": int,
}
_SWITCHES = ("--group-query-attention", "--qk-layernorm", "--untie-embeddings-and-output-weights", "--swiglu")
