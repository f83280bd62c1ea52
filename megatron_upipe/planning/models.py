"""What a simulation has to know of a model: presets, and HF ``config.json`` files. Free of torch."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_upipe.errors import UPipeError


@dataclass(frozen=True)
class ModelShape:
    """A decoder with grouped-query attention and a gated MLP, dense or of experts."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    rope_base: float = 500000.0
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    tied: bool = False

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return self.layers * self.layer_parameters + self.hidden + self.vocabulary * self.hidden * (2 - self.tied)

    @property
    def layer_parameters(self) -> int:
        mlp = 3 * self.hidden * self.ffn * max(1, self.experts) + self.experts * self.hidden
        return self.attention_parameters + mlp + 2 * self.hidden

    @property
    def attention_parameters(self) -> int:
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        return self.hidden * (rows + self.heads * self.head_dim) + 2 * self.head_dim * self.qk_norm

    @property
    def active_parameters(self) -> int:
        """Of those, what one token is multiplied by; the embedding is looked up."""
        unused = 3 * self.hidden * self.ffn * max(0, self.experts - self.experts_per_token)
        return self.parameters - self.layers * unused - self.vocabulary * self.hidden * (not self.tied)


_LLAMA = dict(kv_heads=8, head_dim=128, vocabulary=128256)
_QWEN3_32B = ModelShape(
    "qwen3-32b", 64, 5120, 64, **{**_LLAMA, "vocabulary": 151936}, ffn=25600, rope_base=1e6, qk_norm=True
)
PRESETS = {
    model.name: model
    for model in (
        ModelShape("llama3-8b", 32, 4096, 32, **_LLAMA, ffn=14336),
        ModelShape("llama3-70b", 80, 8192, 64, **_LLAMA, ffn=28672),
        _QWEN3_32B,
        # as the paper has it: Llama's architecture and tokenizer
        replace(_QWEN3_32B, name="qwen3-32b-no-qk-norm", qk_norm=False, vocabulary=128256),
        ModelShape(
            "mixtral-8x7b",
            32,
            4096,
            32,
            **{**_LLAMA, "vocabulary": 32000},
            ffn=14336,
            rope_base=1e6,
            experts=8,
            experts_per_token=2,
        ),
    )
}


def find_model(name: str) -> ModelShape:
    """A preset by name, or the model of a ``config.json`` by path. Raises UPipeError."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if path.suffix == ".json" or path.is_dir():
        return _from_hf(path / "config.json" if path.is_dir() else path)
    near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0)[0]
    raise UPipeError(
        f"--model {name} is not known; the nearest is {near}, of {', '.join(PRESETS)}, or a Hugging Face config.json"
    )


def _from_hf(path: Path) -> ModelShape:
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UPipeError(f"--model {path} cannot be read: {error}") from error
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return ModelShape(
            name=config.get("model_type", path.parent.name),
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            ffn=config.get("moe_intermediate_size") or config["intermediate_size"],
            vocabulary=config["vocab_size"],
            rope_base=config.get("rope_theta") or 10000.0,
            qk_norm="qwen3" in config.get("model_type", ""),
            experts=config.get("num_local_experts") or config.get("num_experts") or 0,
            experts_per_token=config.get("num_experts_per_tok") or 0,
            tied=bool(config.get("tie_word_embeddings")),
        )
    except KeyError as error:
        raise UPipeError(f"--model {path} has no {error.args[0]}; is it the config.json of a decoder?") from error
