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

from megatron_upipe.errors import UPipeError
from megatron_upipe.kernels.conventions import (
    fp32_dq_bytes,
    from_package,
    imported,
    refuses_on_gpu,
    to_package,
)
from megatron_upipe.kernels.protocol import Documents
from megatron_upipe.precision.te_package import refuses_te

MODULE = "transformer_engine.pytorch.cpp_extensions.fused_attn"
FUNCTIONS = ("fused_attn_fwd", "fused_attn_bwd", "FusedAttnBackend")


def fused_forward(
    qkv: Sequence[Any],
    plain: Sequence[Tensor],
    backend: str,
    causal: bool,
    scale: float,
    documents: Documents | None = None,
    **rest: Any,
) -> tuple[Any, Tensor]:
    """out as ``qkv`` in memory, [b, l, n, d] or packed [l, n, d], and lse [b, n, l].

    ``plain`` are q, k and v in 16 bits, ``rest`` quantizers.
    """
    (q, k, v), like = qkv, plain[0]
    function, _, backends = imported(MODULE, *FUNCTIONS)
    out, auxiliary = function(
        is_training=True,
        q=q,
        k=k,
        v=v,
        fused_attention_backend=backends[backend],
        o_format=_format(documents),
        rng_gen=_generator(like.device),
        **_arguments(like, plain[1], causal, scale, documents),
        **rest,
    )
    if documents is not None:
        if auxiliary[0].numel() != like.shape[0] * like.shape[1]:
            raise UPipeError(
                "this cuDNN gives the lse of packed documents padded, which UPipe does not read; choose another "
                "--upipe-attention-backend than transformer-engine"
            )
        return out, auxiliary[0].view(like.shape[:2]).t().unsqueeze(0)
    return out, auxiliary[0].view(like.shape[0], like.shape[2], like.shape[1])


def fused_backward(
    dout: Any,
    qkv: Sequence[Any],
    out: Tensor,
    lse: Tensor,
    like_keys: Tensor,
    backend: str,
    causal: bool,
    scale: float,
    documents: Documents | None = None,
    further: Sequence[Tensor] = (),
    **rest: Any,
) -> list[Tensor]:
    """dq, dk, dv as ``qkv`` in memory; ``lse`` [b, n, l]. ``further`` are auxiliary tensors, ``rest`` determinism,
    formats."""
    q, k, v = qkv
    _, function, backends = imported(MODULE, *FUNCTIONS)
    state = torch.zeros(2, dtype=torch.int64, device=lse.device)  # of dropout, which there is none of
    statistics = lse if documents is None else lse.squeeze(0).t()  # [b, n, l], packed [l, n]
    auxiliary = [statistics.unsqueeze(-1).contiguous(), state, *further]
    gradients = function(
        q=q,
        k=k,
        v=v,
        o=out,
        d_o=dout,
        aux_ctx_tensors=auxiliary,
        fused_attention_backend=backends[backend],
        o_format=_format(documents),
        do_format=_format(documents),
        dqkv_layout=_layout(documents),
        **_arguments(out, like_keys, causal, scale, documents),
        **rest,
    )
    return list(gradients[:3])


def contiguous(documents: Documents | None, *tensors: Tensor) -> list[Tensor]:
    """``to_package`` in memory: the functions read no strides."""
    return [t.contiguous() for t in to_package(documents, *tensors)]


def _format(documents: Documents | None) -> str:
    return "bshd" if documents is None else "thd"


def _layout(documents: Documents | None) -> str:
    return "_".join([_format(documents)] * 3)


def _arguments(
    like: Tensor, like_keys: Tensor, causal: bool, scale: float, documents: Documents | None
) -> dict[str, Any]:
    """Everything explicit: the functions' own defaults are for other layouts and masks."""
    if documents is None:
        sequences = [(_even_lengths(*t.shape[:2], like.device), t.shape[1]) for t in (like, like_keys)]
        mask, places = "causal" if causal else "no_mask", {}
    else:
        sequences = [
            (documents.cumulative_queries, max(documents.queries)),
            (documents.cumulative_keys, max(documents.keys)),
        ]
        mask = "padding_causal" if causal else "padding"
        places = dict(cu_seqlens_q_padded=sequences[0][0], cu_seqlens_kv_padded=sequences[1][0])
    (cumulative_queries, longest_queries), (cumulative_keys, longest_keys) = sequences
    return dict(
        max_seqlen_q=longest_queries,
        max_seqlen_kv=longest_keys,
        cu_seqlens_q=cumulative_queries,
        cu_seqlens_kv=cumulative_keys,
        fake_dtype=like.dtype,
        attn_scale=scale,
        dropout=0.0,
        qkv_layout=_layout(documents),
        attn_bias_type="no_bias",
        attn_mask_type=mask,
        softmax_type="vanilla",
        window_size=(-1, 0) if causal else (-1, -1),
        bottom_right_diagonal=False,
        **places,
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
    windows: bool = False
    deterministic: bool = False

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return refuses_te() or refuses_on_gpu(device, dtype, head_dim, range(9, 13), most=128)

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
        q, k, v = contiguous(documents, q, k, v)
        out, lse = fused_forward((q, k, v), (q, k, v), "F16_arbitrary_seqlen", causal, scale, documents)
        return from_package(documents, out)[0], lse

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
        dout, q, k, v, out = contiguous(documents, dout, q, k, v, out)
        how = ("F16_arbitrary_seqlen", causal, scale, documents)
        gradients = fused_backward(dout, (q, k, v), out, lse, k, *how, deterministic=self.deterministic)
        return tuple(from_package(documents, *gradients))

    def workspace_bytes(self, batch: int, heads: int, tokens: int, head_dim: int) -> int:
        return fp32_dq_bytes(batch, heads, tokens, head_dim)
