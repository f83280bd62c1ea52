"""What a simulation has to know of a model: presets. Free of torch."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from pathlib import Path

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
    """A preset by name, or the model of a file by path (``model_files.py``). Raises UPipeError."""
    from megatron_upipe.planning.model_files import from_hugging_face, from_megatron

    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if path.suffix == ".json" or path.is_dir():
        return from_hugging_face(path / "config.json" if path.is_dir() else path)
    if path.is_file():
        return from_megatron(path)
    near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0)[0]
    raise UPipeError(
        f"--model {name} is not known; the nearest is {near}, of {', '.join(PRESETS)}; or give a Hugging Face "
        "config.json, or a file with Megatron-LM's flags"
    )
