"""Explicit softmax in plain torch: any device, any dtype, quadratic memory. The reference for every other kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_upipe.context.merge import accumulation_dtype
from megatron_upipe.kernels.one_by_one import allowed
from megatron_upipe.kernels.protocol import Documents


@dataclass(frozen=True)
class ReferenceKernel:
    """Computes in fp32, or in fp64 for fp64 inputs. See ``protocol.Kernel``."""

    name: str = "reference"
    windows: bool = True

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return None if dtype.is_floating_point else f"{dtype} is not a floating-point type"

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float,
        left: int | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor]:
        scores = _scores(q, k, causal, scale, left, documents)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
        return _grouped(weights, v).to(q.dtype), lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
        left: int | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = accumulation_dtype(q.dtype)
        scores = _scores(q, k, causal, scale, left, documents)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
        dout, out = dout.to(dtype), out.to(dtype)
        b, m, l, d = q.shape
        c = k.shape[1]
        group = (b, c, m // c)
        dweights = (dout.view(*group, l, d) @ v.to(dtype).unsqueeze(2).transpose(-1, -2)).view(b, m, l, -1)
        dscores = weights * (dweights - (dout * out).sum(-1, keepdim=True)) * scale
        dq = _grouped(dscores, k)
        dk = (dscores.view(*group, l, -1).transpose(-1, -2) @ q.to(dtype).reshape(*group, l, d)).sum(2)
        dv = (weights.view(*group, l, -1).transpose(-1, -2) @ dout.view(*group, l, d)).sum(2)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)

    def workspace_bytes(self, batch: int, heads: int, tokens: int, head_dim: int) -> int:
        return 3 * batch * heads * tokens * tokens * 4  # scores, weights and a gradient of them


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float, left: int | None, documents: Documents | None) -> Tensor:
    """``scale * q k^T`` [b, m, l, l'] in accumulation dtype, -inf where a query does not see a key."""
    dtype = accumulation_dtype(q.dtype)
    b, m, l, d = q.shape
    c = k.shape[1]
    scores = q.to(dtype).reshape(b, c, m // c, l, d) @ k.to(dtype).unsqueeze(2).transpose(-1, -2)
    scores = scores.view(b, m, l, -1) * scale
    queries, keys = (documents.queries, documents.keys) if documents else ((l,), (k.shape[2],))
    if causal and queries != keys:
        raise ValueError(f"a causal block is square, got {queries} queries and {keys} keys")
    if not causal and left is None and documents is None:
        return scores
    seen = [
        allowed(n, of, -n if left is None else of - n - left, 0 if causal else None, q.device)
        for n, of in zip(queries, keys, strict=True)
    ]
    return scores.masked_fill_(~torch.block_diag(*seen).bool(), -torch.inf)


def _grouped(weights: Tensor, values: Tensor) -> Tensor:
    """``weights`` [b, m, l, l'] times ``values`` [b, c, l', d] of each head's KV group -> [b, m, l, d]."""
    b, m, l, keys = weights.shape
    c = values.shape[1]
    product = weights.view(b, c, m // c, l, keys) @ values.to(weights.dtype).unsqueeze(2)
    return product.view(b, m, l, -1)
