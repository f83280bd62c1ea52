"""Megatron's GPTModel, unchanged but for its loss, which comes in tiles, and the RoPE table that nobody would read."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from megatron_upipe.integration.symbols import Replacement

GPT_MODEL = "megatron.core.models.gpt.gpt_model:GPTModel"


class NoTable(torch.nn.Module):
    """In the place of Megatron's RotaryEmbedding: UPipe's exact angles are made in the layers, for local tokens only.

    Megatron's table has the whole sequence: 6 GiB on the way at 8M tokens. Inference still gets it.
    """

    def __init__(self, original: torch.nn.Module) -> None:
        super().__init__()
        self.original = original
        self._inference = False

    def get_rotary_seq_len(self, inference_context: Any, *args: Any, **kwargs: Any) -> int:
        self._inference = inference_context is not None
        return self.original.get_rotary_seq_len(inference_context, *args, **kwargs)

    def forward(self, length: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._inference:
            return self.original(length, *args, **kwargs)
        return self.original.inv_freq.new_empty(0)

    def get_cos_sin(self, *args: Any, **kwargs: Any) -> Any:
        return self.original.get_cos_sin(*args, **kwargs)


def _without_table(original: Callable) -> Callable:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        upipe = getattr(self.config, "upipe", None)
        if upipe is not None and upipe.rope == "exact" and self.position_embedding_type == "rope":
            self.rotary_pos_emb = NoTable(self.rotary_pos_emb)

    __init__.__signature__ = inspect.signature(original)
    return __init__


def _with_tiled_loss(original: Callable) -> Callable:
    signature = inspect.signature(original)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron_upipe.layers.output import tiled_losses

        upipe = getattr(self.config, "upipe", None)
        given = signature.bind(self, *args, **kwargs).arguments
        if upipe is not None and upipe.loss_tile_tokens and given.get("labels") is not None:
            kwargs.setdefault("output_processor", tiled_losses)
        return original(self, *args, **kwargs)

    forward.__signature__ = signature
    return forward


def replacements() -> list[Replacement]:
    return [
        Replacement(f"{GPT_MODEL}.__init__", _without_table, "no full-length RoPE table where angles are exact"),
        Replacement(f"{GPT_MODEL}.forward", _with_tiled_loss, "hands Megatron the tiled loss as output processor"),
    ]
