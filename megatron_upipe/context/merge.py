"""Merging the attention of two sets of keys by their log-sum-exps."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_IN_LOW_PRECISION = 8
"""Sums of up to so many parts may be made in bf16; more roundings than that show."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merges a block's attention into ``out`` and ``lse``, in place.

    ``out`` [b, n, l, d] and ``lse`` [b, n, l] in accumulation dtype. A row without keys has out 0 and lse -inf, and
    stays so if neither side has any.
    """
    merged = torch.logaddexp(lse, block_lse)
    # where neither side has keys merged is -inf, and (-inf) - (-inf) would be NaN
    base = torch.where(merged == -torch.inf, 0.0, merged)
    out.mul_(torch.exp(lse - base).unsqueeze(-1))
    out.addcmul_(block_out.to(out.dtype), torch.exp(block_lse - base).unsqueeze(-1))
    lse.copy_(merged)
