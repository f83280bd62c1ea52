"""FP8 attention in plain torch, on any device: the roundings of ``te_fp8.py``, products in fp64, quadratic memory.

``forward``: q, k, v and out in E4M3 with one scale each, softmax weights in E4M3 with a fixed one; backward that of
another kernel. ``full``: MXFP8, blocks of 32 along what each product sums over, also of the weights and gradients
inside; what the GPU kernel does to those inside is not documented, so here it is a model of it, not a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_upipe.kernels.reference import ReferenceKernel
from megatron_upipe.kernels.te_fp8 import OUT_LARGEST, SOFTMAX_SCALE, BackwardIn16Bits
from megatron_upipe.precision.twin import E4M3, Quantised, quantise_blocks, quantise_tensor


@dataclass(frozen=True)
class Fp8TwinForward(BackwardIn16Bits):
    """See ``protocol.Kernel`` and ``te_fp8.TransformerEngineFp8Forward``."""

    name: str = "fp8-twin"

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return ReferenceKernel().refuses(device, dtype, head_dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        tensors = [_rounded(partial(quantise_tensor, dtype=E4M3), t) for t in (q, k, v)]
        largest = v.abs().amax().double()
        out, lse = _attend(*tensors, causal, scale, lambda p: (p * SOFTMAX_SCALE).to(E4M3).double() / SOFTMAX_SCALE)
        if largest > 0:
            out = (out * (OUT_LARGEST / largest)).to(E4M3).double() * (largest / OUT_LARGEST)
        return out.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32))


@dataclass(frozen=True)
class Fp8TwinMxfp8:
    """See ``protocol.Kernel`` and ``te_fp8.TransformerEngineMxfp8``."""

    name: str = "mxfp8-twin"

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return ReferenceKernel().refuses(device, dtype, head_dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = _attend(_along_features(q), _along_features(k), _along_tokens(v), causal, scale, _along_features)
        return out.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = q.shape[1] // k.shape[1]
        scores = _scores(_along_features(q), _along_features(k), causal, scale)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).double().unsqueeze(-1))
        values = _along_features(v).repeat_interleave(group, 1)
        dweights = _along_features(dout) @ values.transpose(-1, -2)
        dscores = weights * (dweights - (dout.double() * out.double()).sum(-1, keepdim=True)) * scale
        dq = _along_features(dscores) @ _along_tokens(k).repeat_interleave(group, 1)
        dk = _along_tokens(dscores).transpose(-1, -2) @ _along_tokens(q)
        dv = _along_tokens(weights).transpose(-1, -2) @ _along_tokens(dout)
        dk, dv = (t.unflatten(1, (-1, group)).sum(2) for t in (dk, dv))
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)

    def workspace_bytes(self, batch: int, heads: int, tokens: int, head_dim: int) -> int:
        return ReferenceKernel().workspace_bytes(batch, heads, tokens, head_dim)


def _rounded(quantise: partial[Quantised], tensor: Tensor) -> Tensor:
    """``tensor`` [.., l, n] as its quantised form has it, in fp64."""
    if tensor.numel() == 0:
        return tensor.double()
    quantised = quantise(tensor.reshape(-1, tensor.shape[-1]))
    return (quantised.values() * quantised.factor()).view(tensor.shape)


def _along_features(tensor: Tensor) -> Tensor:
    return _rounded(partial(quantise_blocks, dtype=E4M3, block=(1, 32), mx=True), tensor)


def _along_tokens(tensor: Tensor) -> Tensor:
    return _along_features(tensor.transpose(-1, -2)).transpose(-1, -2)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * scale
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(above, -torch.inf)
    return scores


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, rounded) -> tuple[Tensor, Tensor]:
    """out and lse; the weights are rounded before their sum with the values, as a GPU kernel does, not in the sum."""
    scores = _scores(q, k, causal, scale)
    lse = torch.logsumexp(scores, -1)
    if scores.shape[-1] == 0:
        return torch.zeros_like(q), lse
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    return rounded(weights) @ v.repeat_interleave(q.shape[1] // k.shape[1], 1) / total, lse
