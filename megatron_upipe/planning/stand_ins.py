"""What takes the place of GPU kernels in a simulation: the same tensors come and go, nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_upipe.kernels.protocol import Documents, Kernel
from megatron_upipe.planning.documents import seen_pairs


@dataclass
class Runs:
    """How often blocks of attention ran forward, and their FLOPs: two products forward, five backward, half under the
    mask."""

    forward: int = 0
    forward_flops: float = 0.0
    backward_flops: float = 0.0


@dataclass(frozen=True)
class SimulatedKernel:
    """See ``kernels.protocol.Kernel``: results and the workspace of ``real``."""

    real: Kernel
    runs: Runs = field(default_factory=Runs)

    @property
    def name(self) -> str:
        return self.real.name

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return None

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
        self.runs.forward += 1
        self.runs.forward_flops += 2 * _product_flops(q, k, causal, left, documents)
        return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)

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
        self.runs.backward_flops += 5 * _product_flops(q, k, causal, left, documents)
        b, heads, tokens, head_dim = q.shape
        gradients = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        workspace = q.new_empty(self.workspace_bytes(b, heads, tokens, head_dim), dtype=torch.uint8)
        del workspace
        return gradients

    def workspace_bytes(self, batch: int, heads: int, tokens: int, head_dim: int) -> int:
        return self.real.workspace_bytes(batch, heads, tokens, head_dim)


def _product_flops(q: Tensor, k: Tensor, causal: bool, left: int | None, documents: Documents | None) -> float:
    b, heads, tokens, head_dim = q.shape
    lengths = ((tokens, k.shape[2]),) if documents is None else zip(documents.queries, documents.keys, strict=True)
    return 2.0 * b * heads * head_dim * sum(seen_pairs(queries, keys, causal, left) for queries, keys in lengths)


class BalancedExperts(torch.nn.Module):
    """Experts behind a router that spreads tokens evenly, in the tensors of Megatron's grouped GEMMs without token
    dropping: as many rows as tokens times experts per token, in order of experts, all at once."""

    def __init__(self, hidden: int, ffn: int, experts: int, per_token: int) -> None:
        super().__init__()
        self.per_token = per_token
        for name, shape in (
            ("router", (experts, hidden)),
            ("gate_and_up", (experts, hidden, 2 * ffn)),
            ("down", (experts, ffn, hidden)),
        ):
            setattr(self, name, torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16)))

    def forward(self, x: Tensor, **others: Any) -> tuple[Tensor, None]:
        from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

        experts = self.router.shape[0]
        tokens = x.reshape(-1, x.shape[-1])
        share = (tokens @ self.router.t()).float().softmax(-1)[:, : self.per_token]
        rows = tokens.repeat(self.per_token, 1).view(experts, -1, x.shape[-1])
        inner = torch.bmm(rows, self.gate_and_up).flatten(0, 1)
        inner = weighted_bias_swiglu_impl(inner, None, share.reshape(-1, 1))
        out = torch.bmm(inner.view(experts, -1, inner.shape[-1]), self.down)
        return out.view(self.per_token, *tokens.shape).sum(0).view(x.shape), None


class FusedNorm(torch.nn.Module):
    """A norm as GPU kernels compute it: keeps its input and one number a row; Megatron's torch norm on a CPU keeps
    several copies in fp32."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight

    def forward(self, x: Tensor) -> Tensor:
        return _FusedNormFunction.apply(x, self.weight)


class _FusedNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
