"""Inner functions of the flash-attention packages as their sources declare them, computing by the reference kernel.

Signatures of flash-attn 2.8.3 (``flash_attn/flash_attn_interface.py``), flash-attn 3 (``hopper/``) and flash-attn 4
(``flash_attn/cute/interface.py``) at commit 0251105a of the flash-attention repository. Layout [b, l, n, d], lse
[b, n, l] in fp32 with +inf for rows without keys, as those packages have it; gradients come in the places given.
"""

import torch

from megatron_upipe.kernels.reference import ReferenceKernel

CALLS = []  # keyword arguments of the last call


def _forward(q, k, v, causal, scale):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out, lse = ReferenceKernel().forward(q, k, v, causal, scale)
    return out.transpose(1, 2).contiguous(), lse.masked_fill(lse == -torch.inf, torch.inf)


def _backward(dout, q, k, v, out, lse, causal, scale):
    assert lse.is_contiguous() and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    tensors = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    return [t.transpose(1, 2) for t in ReferenceKernel().backward(*tensors, lse, causal, scale)]


def flash_attn_2_forward(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    return_softmax,
):
    CALLS.append(dict(locals()))
    out, lse = _forward(q, k, v, causal, softmax_scale)
    return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)


def flash_attn_2_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
):
    CALLS.append(dict(locals()))
    gradients = _backward(dout, q, k, v, out, softmax_lse, causal, softmax_scale)
    for target, gradient in zip((dq, dk, dv), gradients, strict=True):
        assert target.is_contiguous()
        target.copy_(gradient)
    return torch.empty(0)


def flash_attn_3_forward(
    q,
    k,
    v,
    k_new=None,
    v_new=None,
    qv=None,
    out_=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    cu_seqlens_k_new=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    page_table=None,
    kv_batch_idx=None,
    leftpad_k=None,
    rotary_cos=None,
    rotary_sin=None,
    seqlens_rotary=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size_left=-1,
    window_size_right=-1,
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=1,
    pack_gqa=None,
    sm_margin=0,
):
    CALLS.append(dict(locals()))
    out, lse = _forward(q, k, v, causal, softmax_scale)
    return out, lse, torch.empty(0), torch.empty(0)


def flash_attn_3_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    sequed_q=None,
    sequed_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    dq=None,
    dk=None,
    dv=None,
    softmax_scale=None,
    is_causal=False,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    deterministic=False,
    sm_margin=0,
):
    CALLS.append(dict(locals()))
    gradients = _backward(dout, q, k, v, out, softmax_lse, is_causal, softmax_scale)
    for target, gradient in zip((dq, dk, dv), gradients, strict=True):
        target.copy_(gradient)
    return torch.empty(0)


def flash_attn_4_forward(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    softmax_scale=None,
    causal=False,
    softcap=None,
    window_size_left=None,
    window_size_right=None,
    learnable_sink=None,
    return_lse=False,
    out=None,
    lse=None,
):
    CALLS.append(dict(locals()))
    assert return_lse
    found, lse = _forward(q, k, v, causal, softmax_scale)
    return found, lse, None, None


def flash_attn_4_backward(
    q,
    k,
    v,
    out,
    dout,
    lse,
    softmax_scale=None,
    causal=False,
    softcap=0.0,
    window_size_left=None,
    window_size_right=None,
    deterministic=False,
    dq=None,
    dk=None,
    dv=None,
):
    CALLS.append(dict(locals()))
    gradients = _backward(dout, q, k, v, out, lse, causal, softmax_scale)
    for target, gradient in zip((dq, dk, dv), gradients, strict=True):
        target.copy_(gradient)
    return dq, dk, dv


MODULES = {
    "flash_attn.flash_attn_interface": dict(
        _flash_attn_forward=flash_attn_2_forward, _flash_attn_backward=flash_attn_2_backward
    ),
    "flash_attn_interface": dict(_flash_attn_forward=flash_attn_3_forward, _flash_attn_backward=flash_attn_3_backward),
    "flash_attn.cute.interface": dict(_flash_attn_fwd=flash_attn_4_forward, _flash_attn_bwd=flash_attn_4_backward),
}
