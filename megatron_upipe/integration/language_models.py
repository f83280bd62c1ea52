"""Megatron's GPTModel and HybridModel, unchanged but for their loss, which comes in tiles, and the RoPE table that
nobody would read."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from megatron_upipe.errors import UPipeError
from megatron_upipe.integration.symbols import Replacement

GPT_MODEL = "megatron.core.models.gpt.gpt_model:GPTModel"
HYBRID_MODEL = "megatron.core.models.hybrid.hybrid_model:HybridModel"


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
    signature = inspect.signature(original)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        _check_kind(signature.bind(self, *args, **kwargs).arguments)
        original(self, *args, **kwargs)
        upipe = getattr(self.config, "upipe", None)
        if upipe is not None and upipe.rope == "exact" and self.position_embedding_type == "rope":
            self.rotary_pos_emb = NoTable(self.rotary_pos_emb)

    __init__.__signature__ = signature
    return __init__


def _check_kind(given: dict[str, Any]) -> None:
    """Megatron fails far from the reason when the spec is for the other kind of model."""
    from megatron.core.models.hybrid.hybrid_block import HybridStack

    from megatron_upipe.layers.transformer_layer import UPipeTransformerLayer

    layer, stack = (
        getattr(given.get(name), "module", None) for name in ("transformer_layer_spec", "hybrid_stack_spec")
    )
    if isinstance(layer, type) and issubclass(layer, HybridStack):
        raise UPipeError(
            f"a GPT model was given the spec of a {layer.__name__}; use upipe_layer_spec, or pretrain_hybrid.py"
        )
    if stack is UPipeTransformerLayer:
        raise UPipeError(
            "a hybrid model was given the spec of a layer; use upipe_hybrid_stack_spec and --hybrid-layer-pattern, or "
            "pretrain_gpt.py"
        )


def _with_tiled_loss(original: Callable) -> Callable:
    signature = inspect.signature(original)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron_upipe.layers.output import tiled_losses

        given = signature.bind(self, *args, **kwargs).arguments
        if _wants_tiles(self, given):
            kwargs.setdefault("output_processor", tiled_losses)
        return original(self, *args, **kwargs)

    forward.__signature__ = signature
    return forward


def with_tiled_loss_after(original: Callable) -> Callable:
    """For HybridModel, which has no output processor: told that the model ends before its output layer, it returns the
    hidden states."""
    signature = inspect.signature(original)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron_upipe.layers.output import tiled_losses

        given = signature.bind(self, *args, **kwargs).arguments
        if not self.post_process or not _wants_tiles(self, given):
            return original(self, *args, **kwargs)
        self.post_process = False
        try:
            hidden_states = original(self, *args, **kwargs)
        finally:
            self.post_process = True
        return tiled_losses(
            hidden_states=hidden_states,
            output_layer=self.output_layer,
            output_weight=self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else None,
            labels=given["labels"],
            scale_logits=self._scale_logits,
            config=self.config,
        )

    forward.__signature__ = signature
    return forward


def _wants_tiles(model: Any, given: dict[str, Any]) -> bool:
    upipe = getattr(model.config, "upipe", None)
    return upipe is not None and bool(upipe.loss_tile_tokens) and given.get("labels") is not None


def replacements() -> list[Replacement]:
    return [
        *(
            Replacement(f"{model}.__init__", _without_table, "no full-length RoPE table where angles are exact")
            for model in (GPT_MODEL, HYBRID_MODEL)
        ),
        Replacement(f"{GPT_MODEL}.forward", _with_tiled_loss, "hands Megatron the tiled loss as output processor"),
        Replacement(f"{HYBRID_MODEL}.forward", with_tiled_loss_after, "the tiled loss in the place of all logits"),
    ]
