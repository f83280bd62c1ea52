"""TransformerEngine's fused attention (cuDNN): bf16 and fp16 on compute capability 9 and later, GQA.

Source: ``transformer_engine/pytorch/cpp_extensions/fused_attn.py``, 2.20. Not run on a GPU so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_upipe.kernels.conventions import fp32_dq_bytes, imported, refuses_on_gpu, tokens_first
from megatron_upipe.precision.te_package import refuses_te

MODULE = "transformer_engine.pytorch.cpp_extensions.fused_attn"
FUNCTIONS = ("fused_attn_fwd", "fused_attn_bwd", "FusedAttnBackend")


def fused_forward(
    qkv: Sequence[Any], plain: Sequence[Tensor], backend: str, causal: bool, scale: float, **rest: Any
) -> tuple[Any, Tensor]:
    """out and lse of ``qkv`` [b, l, n, d] in memory; ``plain`` are q, k and v in 16 bits, ``rest`` quantizers."""
    (q, k, v), like = qkv, plain[0]
    function, _, backends = imported(MODULE, *FUNCTIONS)
    out, auxiliary = function(
        is_training=True,
        q=q,
        k=k,
        v=v,
        fused_attention_backend=backends[backend],
        o_format="bshd",
        rng_gen=_generator(like.device),
        **_arguments(like, plain[1].shape[1], causal, scale),
        **rest,
    )
    return out, auxiliary[0].view(like.shape[0], like.shape[2], like.shape[1])


def fused_backward(
    dout: Any,
    qkv: Sequence[Any],
    out: Tensor,
    lse: Tensor,
    keys: int,
    backend: str,
    causal: bool,
    scale: float,
    further: Sequence[Tensor] = (),
    **rest: Any,
) -> list[Tensor]:
    """dq, dk, dv [b, l, n, d]; ``lse`` [b, n, l]. ``further`` are auxiliary tensors, ``rest`` determinism, formats."""
    q, k, v = qkv
    _, function, backends = imported(MODULE, *FUNCTIONS)
    state = torch.zeros(2, dtype=torch.int64, device=lse.device)  # of dropout, which there is none of
    auxiliary = [lse.unsqueeze(-1).contiguous(), state, *further]
    gradients = function(
        q=q,
        k=k,
        v=v,
        o=out,
        d_o=dout,
        aux_ctx_tensors=auxiliary,
        fused_attention_backend=backends[backend],
        o_format="bshd",
        do_format="bshd",
        dqkv_layout="bshd_bshd_bshd",
        **_arguments(out, keys, causal, scale),
        **rest,
    )
    return list(gradients[:3])


def contiguous(*tensors: Tensor) -> list[Tensor]:
    """[b, n, l, d] -> [b, l, n, d] in memory: the functions read no strides."""
    return [t.contiguous() for t in tokens_first(*tensors)]


def _arguments(like: Tensor, keys: int, causal: bool, scale: float) -> dict[str, Any]:
    """Everything explicit: the functions' own defaults are for other layouts and masks."""
    b, l, _, _ = like.shape
    return dict(
        max_seqlen_q=l,
        max_seqlen_kv=keys,
        cu_seqlens_q=_even_lengths(b, l, like.device),
        cu_seqlens_kv=_even_lengths(b, keys, like.device),
        fake_dtype=like.dtype,
        attn_scale=scale,
        dropout=0.0,
        qkv_layout="bshd_bshd_bshd",
        attn_bias_type="no_bias",
        attn_mask_type="causal" if causal else "no_mask",
        softmax_type="vanilla",
        window_size=(-1, 0) if causal else (-1, -1),
        bottom_right_diagonal=False,
    )


def _even_lengths(sequences: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(0, (sequences + 1) * length, length, dtype=torch.int32, device=device)


@cache
def _generator(device: torch.device) -> torch.Generator:
    """Each forward call advances a generator even without dropout; not the one that the model draws from."""
    return torch.Generator(device)


@dataclass(frozen=True)
class TransformerEngineKernel:
    """See ``protocol.Kernel``."""

    name: str = "transformer-engine"
    deterministic: bool = False

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return refuses_te() or refuses_on_gpu(device, dtype, head_dim, range(9, 13), most=128)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = contiguous(q, k, v)
        out, lse = fused_forward((q, k, v), (q, k, v), "F16_arbitrary_seqlen", causal, scale)
        return out.transpose(1, 2), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = contiguous(dout, q, k, v, out)
        how = ("F16_arbitrary_seqlen", causal, scale)
        gradients = fused_backward(dout, (q, k, v), out, lse, k.shape[1], *how, deterministic=self.deterministic)
        return tuple(tokens_first(*gradients))

    def workspace_bytes(self, batch: int, heads: int, tokens: int, head_dim: int) -> int:
        return fp32_dq_bytes(batch, heads, tokens, head_dim)
