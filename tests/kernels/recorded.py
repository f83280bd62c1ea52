"""Inner functions of the flash-attention packages as their sources declare them, computing by the reference kernel.

Signatures of flash-attn 2.8.3 (``flash_attn/flash_attn_interface.py``), flash-attn 3 (``hopper/``) and flash-attn 4
(``flash_attn/cute/interface.py``) at commit 0251105a of the flash-attention repository. Layout [b, l, n, d], lse
[b, n, l] in fp32 with +inf for rows without keys, as those packages have it; gradients come in the places given.
"""

import torch

from megatron_upipe.kernels.protocol import Documents
from megatron_upipe.kernels.reference import ReferenceKernel

CALLS = []  # keyword arguments of the last call


def _masks(causal, left, right, cu_seqlens_q, cu_seqlens_k, longest):
    """Arguments of the reference for masks as the packages understand them."""
    left, right = (None if side in (None, -1) else side for side in (left, right))
    assert right is None or (causal and right == 0 and left is not None), "a window of causal attention ends at 0"
    if cu_seqlens_q is None:
        return causal, left, None
    lengths = [(cu[1:] - cu[:-1]).tolist() for cu in (cu_seqlens_q, cu_seqlens_k)]
    assert all(cu.dtype == torch.int32 and cu[0] == 0 for cu in (cu_seqlens_q, cu_seqlens_k))
    assert [max(n) for n in lengths] == list(longest)
    return causal, left, Documents.of(*lengths, cu_seqlens_q.device)


def _heads_first(documents, *tensors):
    return [(t if documents is None else t.unsqueeze(0)).transpose(1, 2) for t in tensors]


def _tokens_first(documents, *tensors):
    return [t.transpose(1, 2) if documents is None else t.transpose(1, 2).squeeze(0) for t in tensors]


def _forward(q, k, v, scale, *masks):
    causal, left, documents = _masks(*masks)
    q, k, v = _heads_first(documents, q, k, v)
    out, lse = ReferenceKernel().forward(q, k, v, causal, scale, left, documents)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    return _tokens_first(documents, out)[0].contiguous(), lse if documents is None else lse.squeeze(0)


def _backward(dout, q, k, v, out, lse, scale, *masks):
    causal, left, documents = _masks(*masks)
    heads_and_tokens = (q.shape[0], q.shape[2], q.shape[1]) if documents is None else (q.shape[1], q.shape[0])
    assert lse.is_contiguous() and lse.shape == heads_and_tokens
    tensors = _heads_first(documents, dout, q, k, v, out)
    lse = lse if documents is None else lse.unsqueeze(0)
    gradients = ReferenceKernel().backward(*tensors, lse, causal, scale, left, documents)
    return _tokens_first(documents, *gradients)


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
    out, lse = _forward(q, k, v, softmax_scale, causal, window_size_left, window_size_right, None, None, None)
    return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)


def flash_attn_2_varlen_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
    block_table=None,
    leftpad_k=None,
    seqused_k=None,
    zero_tensors=False,
):
    CALLS.append(dict(locals()))
    sequences = (cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k))
    out, lse = _forward(q, k, v, softmax_scale, causal, window_size_left, window_size_right, *sequences)
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
    masks = (causal, window_size_left, window_size_right, None, None, None)
    gradients = _backward(dout, q, k, v, out, softmax_lse, softmax_scale, *masks)
    for target, gradient in zip((dq, dk, dv), gradients, strict=True):
        assert target.is_contiguous()
        target.copy_(gradient)
    return torch.empty(0)


def flash_attn_2_varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
    zero_tensors=False,
):
    CALLS.append(dict(locals()))
    masks = (causal, window_size_left, window_size_right, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k))
    gradients = _backward(dout, q, k, v, out, softmax_lse, softmax_scale, *masks)
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
    masks = (causal, window_size_left, window_size_right, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k))
    out, lse = _forward(q, k, v, softmax_scale, *masks)
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
    masks = (is_causal, window_size_left, window_size_right, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k))
    gradients = _backward(dout, q, k, v, out, softmax_lse, softmax_scale, *masks)
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
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
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
    masks = (causal, window_size_left, window_size_right, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k))
    found, lse = _forward(q, k, v, softmax_scale, *masks)
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
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    deterministic=False,
    dq=None,
    dk=None,
    dv=None,
):
    CALLS.append(dict(locals()))
    masks = (causal, window_size_left, window_size_right, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k))
    gradients = _backward(dout, q, k, v, out, lse, softmax_scale, *masks)
    for target, gradient in zip((dq, dk, dv), gradients, strict=True):
        target.copy_(gradient)
    return dq, dk, dv


MODULES = {
    "flash_attn.flash_attn_interface": dict(
        _flash_attn_forward=flash_attn_2_forward,
        _flash_attn_backward=flash_attn_2_backward,
        _flash_attn_varlen_forward=flash_attn_2_varlen_forward,
        _flash_attn_varlen_backward=flash_attn_2_varlen_backward,
    ),
    "flash_attn_interface": dict(_flash_attn_forward=flash_attn_3_forward, _flash_attn_backward=flash_attn_3_backward),
    "flash_attn.cute.interface": dict(_flash_attn_fwd=flash_attn_4_forward, _flash_attn_bwd=flash_attn_4_backward),
}
