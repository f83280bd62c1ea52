"""What TransformerEngine's kernels compute, on a CPU: the contract that our calls of its functions rely on.

Works on the recorded classes of ``recorded.py`` and on TransformerEngine's own alike. Storage of one FP8 tensor holds
rows in ``_data`` and, for products over tokens, a transpose; blockwise and MXFP8 tensors are the twin's operands.
"""

from dataclasses import replace

import torch

from megatron_upipe.kernels.protocol import Documents
from megatron_upipe.kernels.reference import ReferenceKernel
from megatron_upipe.precision.recipes import Fp8Recipe
from megatron_upipe.precision.twin import E4M3, E5M2, TwinPrecision, quantise_blocks, quantise_tensor

CALLS = []  # (function, arguments by name)
ONE_COPY_SERVES = False  # as on Blackwell, whose GEMMs need no transpose of a tensor with one scale


def torch_dtype(fp8_dtype):
    return E5M2 if "E5M2" in fp8_dtype.name else E4M3


class Blocks:
    """A blockwise or MXFP8 tensor."""

    def __init__(self, operand, shape):
        self.operand, self.shape = operand, shape

    def update_usage(self, rowwise_usage=None, columnwise_usage=None):
        assert columnwise_usage is not False and (not columnwise_usage or self.operand.along is not None)
        if rowwise_usage is False:
            self.operand = replace(self.operand, across=None)


def quantise(quantizer, tensor, storage):
    """What a quantizer makes of a tensor. ``storage``: the class of one FP8 tensor's storage."""
    assert tensor.is_contiguous() and not tensor.requires_grad
    kind, dtype = type(quantizer).__name__, torch_dtype(quantizer.dtype)
    rows, columns = quantizer.rowwise_usage, quantizer.columnwise_usage
    assert rows, "not in the casts of one scale a tensor, nor in those of 128 x 128 before 2.20"
    flat = tensor.reshape(-1, tensor.shape[-1])
    if kind in ("Float8CurrentScalingQuantizer", "Float8Quantizer"):
        if kind == "Float8Quantizer":
            data, scale_inv = (flat.float() * quantizer.scale).to(dtype), quantizer.scale.reciprocal()
        else:
            found = quantise_tensor(flat, dtype)
            data, scale_inv = found.data, found.scale_inv
        data = data.view(torch.uint8)
        return storage(
            data=data.view(tensor.shape),
            fp8_scale_inv=scale_inv,
            fp8_dtype=quantizer.dtype,
            fake_dtype=tensor.dtype,
            data_transpose=data.t().contiguous() if columns and not ONE_COPY_SERVES else None,
            quantizer=quantizer,
        )
    if kind == "Float8BlockQuantizer" and quantizer.block_scaling_dim == 2:
        found = quantise_blocks(flat, dtype, (128, 128), mx=False)
        operand = TwinPrecision(Fp8Recipe("blockwise", False)).tokens(flat, True, True)
        operand = type(operand)(found, found if columns else None, tensor.dtype)
    else:
        name = "mxfp8" if kind == "MXFP8Quantizer" else "blockwise"
        operand = TwinPrecision(Fp8Recipe(name, dtype == E5M2))._operand(flat, dtype, rows, columns)
    return Blocks(operand, tensor.shape)


def values(tensor, along=False):
    """In fp64: rows as they are, or ``along``, from what a product over rows reads."""
    if isinstance(tensor, Blocks):
        part = tensor.operand.along if along else tensor.operand.across
        assert part is not None, "this usage was not asked for"
        return (part.values() * part.factor()).view(tensor.shape)
    if isinstance(tensor, torch.Tensor) and not hasattr(tensor, "_scale_inv"):
        return tensor.double()
    transposed = along and not ONE_COPY_SERVES
    data = tensor._transpose if transposed else tensor._data
    assert data is not None and data.is_contiguous(), "this usage was not asked for"
    found = data.view(torch_dtype(tensor._fp8_dtype)).double() * tensor._scale_inv.double()
    return found.t() if transposed else found


def general_gemm(arguments):
    CALLS.append(("general_gemm", arguments))
    a, b, layout, out = (arguments.get(name) for name in ("A", "B", "layout", "out"))
    if layout == "TN":
        result = values(b) @ values(a).t()
    elif layout == "NN":
        result = values(b) @ values(a, along=True)
    else:
        result = values(b, along=True).t() @ values(a, along=True)
    assert arguments.get("grad", False) is (layout != "TN")
    if arguments.get("bias") is not None:
        result = result + arguments["bias"]
    if out is None:
        return result.to(arguments["out_dtype"]), None, None, None
    assert out.is_contiguous() and out.dtype == arguments["out_dtype"] and arguments["accumulate"] is True
    return out.copy_(out.double() + result), None, None, None


def _attention_tensors(arguments, names):
    tensors = []
    for name in names:
        assert not isinstance(arguments[name], torch.Tensor) or arguments[name].is_contiguous()
        tensor = values(arguments[name])
        tensors.append((tensor.unsqueeze(0) if _packed(arguments) else tensor).transpose(1, 2))
    return tensors


def _packed(arguments):
    return arguments["o_format"] == "thd"


def _in_memory(arguments, tensor):
    """[b, n, l, d] as the caller has it."""
    tensor = tensor.transpose(1, 2).contiguous().to(arguments["fake_dtype"])
    return tensor.squeeze(0) if _packed(arguments) else tensor


def _check(arguments):
    """Whether it is causal, and the documents."""
    assert arguments["dropout"] == 0.0
    masks = {"padding_causal": True, "padding": False} if _packed(arguments) else {"causal": True, "no_mask": False}
    causal = masks[arguments["attn_mask_type"]]
    assert arguments["window_size"] == ((-1, 0) if causal else (-1, -1))
    assert arguments["qkv_layout"] == "_".join([arguments["o_format"]] * 3)
    if _packed(arguments):
        lengths = []
        for which in ("q", "kv"):
            cumulative = arguments[f"cu_seqlens_{which}"]
            assert arguments[f"cu_seqlens_{which}_padded"] is cumulative and cumulative.dtype == torch.int32
            lengths.append((cumulative[1:] - cumulative[:-1]).tolist())
            assert max(lengths[-1]) == arguments[f"max_seqlen_{which}"]
        return causal, Documents.of(*lengths, torch.device("cpu"))
    assert arguments["o_format"] == "bshd"
    b, l = arguments["q"].shape[0], arguments["max_seqlen_q"]
    assert arguments["cu_seqlens_q"].tolist() == [i * l for i in range(b + 1)]
    assert arguments["cu_seqlens_kv"].tolist() == [i * arguments["max_seqlen_kv"] for i in range(b + 1)]
    return causal, None


def fused_attn_fwd(arguments):
    CALLS.append(("fused_attn_fwd", arguments))
    assert arguments["rng_gen"] is not None, "the model's generator would advance with every stage"
    tensors = _attention_tensors(arguments, ("q", "k", "v"))
    causal, documents = _check(arguments)
    out, lse = ReferenceKernel().forward(*tensors, causal, arguments["attn_scale"], None, documents)
    out = _in_memory(arguments, out)
    if documents is not None:
        lse = lse.squeeze(0).t()  # [l, n]
    if arguments.get("o_quantizer") is not None:
        assert arguments["s_quantizer"].scale.numel() == 1
        out = arguments["o_quantizer"](out)
    return out, [lse.unsqueeze(-1).to(torch.float32), torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(arguments):
    CALLS.append(("fused_attn_bwd", arguments))
    assert arguments["do_format"] == arguments["o_format"] and arguments["dqkv_layout"] == arguments["qkv_layout"]
    causal, documents = _check(arguments)
    stats, state, *_ = arguments["aux_ctx_tensors"]
    assert stats.is_contiguous() and stats.shape[-1] == 1 and state.numel() == 2
    lse = stats.squeeze(-1) if documents is None else stats.squeeze(-1).t().unsqueeze(0)
    tensors = _attention_tensors(arguments, ("d_o", "q", "k", "v", "o"))
    scale = arguments["attn_scale"]
    gradients = ReferenceKernel().backward(*tensors, lse, causal, scale, None, documents)
    gradients = [_in_memory(arguments, g) for g in gradients]
    return (*gradients, None, None)


def combine_and_quantize(arguments):
    CALLS.append(("combine_and_quantize", arguments))
    assert arguments["used_in_forward"] is not arguments["used_in_backward"]
    quantizer = arguments["qkv_quantizer"]
    assert "MXFP8" in type(quantizer).__name__
    found = [quantizer(arguments[name].contiguous()) for name in ("q", "k", "v")]
    return (*found, arguments["qkv_layout"], "bhsd")


def mxfp8_quantize_fast_path(arguments):
    CALLS.append(("mxfp8_quantize_fast_path", arguments))
    return [quantizer(tensor) for tensor, quantizer in arguments["tensor_quantizer_pairs"]], "bhsd"
