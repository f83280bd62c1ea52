"""Weights of Llama-like decoders (Llama, Mistral, Qwen2, Qwen3), Hugging Face's names and Megatron's.

Megatron keeps q, k and v of a KV group together, and the two halves of a gated MLP in one matrix. Pure tensor code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class Shape:
    """``biases``: of q, k and v (Qwen2); ``qk_norm`` as in Qwen3; ``tied``: one matrix for embedding and output."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    biases: bool
    qk_norm: bool
    tied: bool


def to_megatron(read: Read, shape: Shape, padded: int) -> Iterator[tuple[str, Tensor]]:
    """Megatron's names with what ``read`` has under Hugging Face's; the vocabulary filled up to ``padded`` rows."""
    yield "embedding.word_embeddings.weight", _pad(read("model.embed_tokens.weight"), padded)
    for layer in range(shape.layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for kind in ("weight", "bias") if shape.biases else ("weight",):
            parts = [read(f"{theirs}self_attn.{name}_proj.{kind}") for name in "qkv"]
            yield f"{ours}self_attention.linear_qkv.{kind}", _join_qkv(*parts, shape)
        gate, up = (read(f"{theirs}mlp.{name}_proj.weight") for name in ("gate", "up"))
        yield f"{ours}mlp.linear_fc1.weight", torch.cat([gate, up])
        for mine, other in _same(shape):
            yield ours + mine, read(theirs + other)
    yield "decoder.final_layernorm.weight", read("model.norm.weight")
    if not shape.tied:
        yield "output_layer.weight", _pad(read("lm_head.weight"), padded)


def to_hugging_face(read: Read, shape: Shape) -> Iterator[tuple[str, Tensor]]:
    """The reverse."""
    yield "model.embed_tokens.weight", read("embedding.word_embeddings.weight")[: shape.vocabulary]
    for layer in range(shape.layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for kind in ("weight", "bias") if shape.biases else ("weight",):
            parts = _split_qkv(read(f"{ours}self_attention.linear_qkv.{kind}"), shape)
            yield from zip((f"{theirs}self_attn.{name}_proj.{kind}" for name in "qkv"), parts, strict=True)
        halves = read(f"{ours}mlp.linear_fc1.weight").chunk(2)
        yield from zip((f"{theirs}mlp.{name}_proj.weight" for name in ("gate", "up")), halves, strict=True)
        for mine, other in _same(shape):
            yield theirs + other, read(ours + mine)
    yield "model.norm.weight", read("decoder.final_layernorm.weight")
    if not shape.tied:
        yield "lm_head.weight", read("output_layer.weight")[: shape.vocabulary]


def _same(shape: Shape) -> list[tuple[str, str]]:
    """Matrices and norms of a layer that differ in their names only."""
    pairs = [
        ("input_layernorm.weight", "input_layernorm.weight"),
        ("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
        ("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        ("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
    ]
    if shape.qk_norm:
        pairs += [(f"self_attention.{n}_layernorm.weight", f"self_attn.{n}_norm.weight") for n in "qk"]
    return pairs


def _join_qkv(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
    """Rows [q x g | k | v] of each KV group; biases, too."""
    groups = [part.unflatten(0, (shape.kv_heads, -1)) for part in (q, k, v)]  # [K, rows of the group, ...]
    return torch.cat(groups, dim=1).flatten(0, 1)


def _split_qkv(qkv: Tensor, shape: Shape) -> tuple[Tensor, ...]:
    queries = shape.heads // shape.kv_heads * shape.head_dim
    groups = qkv.unflatten(0, (shape.kv_heads, -1)).split([queries, shape.head_dim, shape.head_dim], dim=1)
    return tuple(part.flatten(0, 1).contiguous() for part in groups)


def _pad(rows: Tensor, padded: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, padded - rows.shape[0]))
