"""Megatron-LM's flags for a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weights import Shape

KINDS = ("llama", "mistral", "qwen2", "qwen3")
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
MULTIPLE = 128  # Megatron's --make-vocab-size-divisible-by


def read_config(folder: Path) -> dict[str, Any]:
    """Raises SystemExit with a sentence for models that this example does not know."""
    if not (folder / "config.json").is_file():
        raise SystemExit(f"{folder} is no Hugging Face folder: it has no config.json")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = config.get("model_type")
    if kind not in KINDS:
        raise SystemExit(f"{folder} is a {kind}; this example converts {', '.join(KINDS)}")
    if config.get("hidden_act", "silu") != "silu" or config.get("mlp_bias"):
        raise SystemExit(f"{folder}: an MLP with {config.get('hidden_act')} or biases is not converted")
    if kind != "qwen2" and config.get("attention_bias"):
        raise SystemExit(f"{folder}: attention_bias, which includes the output projection, is not converted")
    if _window(config):
        raise SystemExit(f"{folder}: a sliding window is not converted")
    return config


def shape_of(config: dict[str, Any]) -> Shape:
    heads = config["num_attention_heads"]
    return Shape(
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocabulary=config["vocab_size"],
        biases=config["model_type"] == "qwen2",
        qk_norm=config["model_type"] == "qwen3",
        tied=bool(config.get("tie_word_embeddings")),
    )


def padded_vocabulary(config: dict[str, Any]) -> int:
    return -(-config["vocab_size"] // MULTIPLE) * MULTIPLE


def model_flags(config: dict[str, Any]) -> list[str]:
    """All that describe the model; length, parallelism and data are the run's. Raises SystemExit."""
    shape = shape_of(config)
    flags = ["--num-layers", shape.layers, "--hidden-size", config["hidden_size"]]
    flags += ["--ffn-hidden-size", config["intermediate_size"], "--num-attention-heads", shape.heads]
    flags += ["--group-query-attention", "--num-query-groups", shape.kv_heads, "--kv-channels", shape.head_dim]
    flags += ["--normalization", "RMSNorm", "--norm-epsilon", config.get("rms_norm_eps", 1e-6), "--swiglu"]
    flags += ["--disable-bias-linear", "--position-embedding-type", "rope", *_rope(config)]
    flags += ["--attention-dropout", 0, "--hidden-dropout", 0]
    flags += ["--add-qkv-bias"] if shape.biases else []
    flags += ["--qk-layernorm"] if shape.qk_norm else []
    flags += [] if shape.tied else ["--untie-embeddings-and-output-weights"]
    return [str(flag) for flag in flags]


def _rope(config: dict[str, Any]) -> list[Any]:
    given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}  # older and newer files
    base = given.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    flags = ["--rotary-base", int(base)]
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    if kind == "default":
        return flags
    if kind == "llama3" and all(given.get(name) == value for name, value in LLAMA3.items()):
        return [*flags, "--use-rope-scaling"]
    raise SystemExit(f"RoPE scaling {kind} with {given} has no flag in Megatron-LM, whose Llama 3 scaling is {LLAMA3}")


def _window(config: dict[str, Any]) -> bool:
    if config["model_type"] == "mistral":
        return bool(config.get("sliding_window"))
    return bool(config.get("use_sliding_window"))
