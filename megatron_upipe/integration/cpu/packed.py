"""Packed documents in Megatron on a CPU.

Megatron's own core attention refuses them, and TransformerEngine's needs a GPU.
"""

from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from typing import Any

import torch

from megatron_upipe.integration.symbols import Replacement


def _one_by_one(original: Callable) -> Callable:
    @wraps(original)
    def forward(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any):
        """With packed parameters [t, heads, d] -> [t, heads*d], every document by itself; padding gives 0."""
        packed = kwargs.pop("packed_seq_params", None)
        if packed is None:
            return original(self, query, key, value, *args, **kwargs)
        real = packed.cu_seqlens_q.tolist()
        padded = real if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded.tolist()
        out = query.new_zeros(query.shape[0], query.shape[1] * value.shape[2])
        parts = []
        for start, (before, behind) in zip(padded, pairwise(real), strict=False):
            place = slice(start, start + behind - before)
            if behind > before:
                document = (t[place].unsqueeze(1) for t in (query, key, value))
                parts.append((place, original(self, *document, *args, **kwargs).squeeze(1)))
        for place, part in parts:
            out[place] = part
        return out

    return forward


def replacements() -> list[Replacement]:
    return [
        Replacement(
            "megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
            _one_by_one,
            "packed documents need TransformerEngine's attention in Megatron",
        ),
        Replacement(
            "megatron.training.training:_seqlen_stats_in_iteration",
            lambda original: torch.zeros(2, dtype=torch.float64),
            "Megatron would make this sum of document lengths on a CUDA device by number",
        ),
    ]
