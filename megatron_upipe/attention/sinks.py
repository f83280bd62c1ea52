"""Attention sinks: each head's softmax has one more logit, its *sink*, whose value is zero.

Applied once, to the attention of all keys: with s the sink, lse becomes log(exp(lse) + exp(s)) and out shrinks to what
is left for the keys. Kernels and ring know nothing of it; their backward takes the global out and lse, which is right
with sinks as it is without. Source: gpt-oss (OpenAI); Megatron's ``--softmax-type`` learnable or off-by-one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_upipe.context.merge import accumulation_dtype


def apply_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Scales ``out`` [b, m, L, d] in place; returns the lse [b, m, L] with the ``sinks`` [m], owned by the caller."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
    for head in range(out.shape[1]):  # one at a time: the product is made in accumulation dtype
        share = torch.exp(lse[:, head] - total[:, head]).unsqueeze(-1)
        out[:, head] = out[:, head].to(accumulation_dtype(out.dtype)) * share
    return total


def sink_gradient(delta: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradient of the ``sinks`` [m] from ``delta`` [b, m, L, 1], the products of out and its gradient, and the lse
    [b, m, L] with sinks; in accumulation dtype."""
    shares = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - lse)
    return -(shares * delta.squeeze(-1)).sum((0, 2))
