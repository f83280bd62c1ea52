"""Every kernel against torch's own softmax attention in fp64, and against the reference in lower precision."""

import pytest
import torch
import torch.nn.functional as F

from megatron_upipe.errors import UPipeError
from megatron_upipe.kernels.protocol import Documents
from megatron_upipe.kernels.reference import ReferenceKernel
from megatron_upipe.kernels.select import KERNELS as ALL_KERNELS
from megatron_upipe.kernels.select import passed_over, select_kernel

CPU = torch.device("cpu")
KERNELS = [kernel for kernel in ALL_KERNELS if kernel.name in ("torch-cpu", "reference")]  # those that run here
SHAPES = [(3, 6, 2, 17, 17, 8), (1, 4, 4, 24, 24, 16), (2, 5, 1, 9, 31, 4)]  # b, m, c, l, l', d


def inputs(shape, dtype=torch.float64):
    torch.manual_seed(1)
    b, m, c, l, keys, d = shape
    q, k, v = (torch.randn(b, n, t, d, dtype=torch.float64) for n, t in ((m, l), (c, keys), (c, keys)))
    dout = torch.randn(b, m, l, d, dtype=torch.float64)
    return [t.to(dtype) for t in (q, k, v, dout)]


def expected(q, k, v, dout, causal, scale):
    q, k, v = (t.double().detach().requires_grad_() for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())


def strided(t):
    """The same values as a view with other strides."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_torch_in_fp64(kernel, shape, causal):
    if causal and shape[3] != shape[4]:
        return
    q, k, v, dout = inputs(shape)
    wanted = expected(q, k, v, dout, causal, 0.3)
    out, lse = kernel.forward(strided(q), strided(k), strided(v), causal, 0.3)
    gradients = kernel.backward(strided(dout), strided(q), strided(k), strided(v), out, lse, causal, 0.3)
    for found, want in zip((out, *gradients), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * 0.3
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_error_is_at_most_twice_plain_torch(kernel, dtype):
    q, k, v, dout = inputs(SHAPES[0], dtype)
    wanted = expected(q, k, v, dout, True, 0.3)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    repeats = q.shape[1] // k.shape[1]
    scores = (leaves[0] @ leaves[1].repeat_interleave(repeats, 1).transpose(-1, -2)) * 0.3
    scores = scores.masked_fill(torch.ones(17, 17, dtype=torch.bool).triu(1), -torch.inf)
    plain = scores.softmax(-1) @ leaves[2].repeat_interleave(repeats, 1)
    plain = (plain.detach(), *torch.autograd.grad(plain, leaves, dout))
    out, lse = kernel.forward(q, k, v, True, 0.3)
    assert lse.dtype == torch.float32 and out.dtype == dtype
    for found, simple, want in zip(
        (out, *kernel.backward(dout, q, k, v, out, lse, True, 0.3)), plain, wanted, strict=True
    ):
        error, allowed = (found.double() - want).abs().max(), (simple.double() - want).abs().max()
        assert error <= 2 * allowed + 1e-6


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_backward_takes_the_global_softmax(kernel):
    """Gradients of two key blocks with the merged out and lse add up to those of all keys."""
    q, k, v, dout = inputs((2, 4, 2, 10, 22, 8))
    wanted = expected(q, k, v, dout, False, 0.5)
    out, lse = kernel.forward(q, k, v, False, 0.5)
    first = kernel.backward(dout, q, k[:, :, :7], v[:, :, :7], out, lse, False, 0.5)
    second = kernel.backward(dout, q, k[:, :, 7:], v[:, :, 7:], out, lse, False, 0.5)
    found = first[0] + second[0], torch.cat((first[1], second[1]), 2), torch.cat((first[2], second[2]), 2)
    for f, want in zip(found, wanted[1:], strict=True):
        torch.testing.assert_close(f, want, rtol=1e-12, atol=1e-12)


def visible(queries, keys, causal, left):
    """bool [l, l']: the definition in ``protocol.Kernel``."""
    offset = torch.arange(keys) - torch.arange(queries).unsqueeze(1)
    seen = offset <= 0 if causal else torch.ones_like(offset, dtype=torch.bool)
    return seen if left is None else seen & (offset >= keys - queries - left)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(
    ("causal", "left", "documents"),
    [
        (True, 0, None),
        (True, 40, None),
        (True, 299, None),
        (False, 7, None),
        (True, None, ((1, 290, 30), (1, 290, 30))),
        (False, None, ((1, 290, 30), (33, 2, 400))),
        (True, 17, ((1, 290, 30), (1, 290, 30))),
        (False, 3, ((1, 290, 30), (9, 300, 30))),
    ],
    ids=str,
)
def test_windows_and_documents(kernel, causal, left, documents):
    """Also longer than a tile of queries."""
    lengths = ((321,), (321 if causal else 345,)) if documents is None else documents
    shape = (1, 6, 2, sum(lengths[0]), sum(lengths[1]), 8)
    q, k, v, dout = inputs(shape)
    seen = torch.block_diag(*(visible(a, b, causal, left) for a, b in zip(*lengths, strict=True))).bool()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*leaves, attn_mask=seen, scale=0.3, enable_gqa=True)
    gradients = torch.autograd.grad(wanted, leaves, dout)
    rest = (causal, 0.3, left, None if documents is None else Documents.of(*documents, CPU))
    out, lse = kernel.forward(strided(q), strided(k), strided(v), *rest)
    found = kernel.backward(strided(dout), strided(q), strided(k), strided(v), out, lse, *rest)
    for f, w in zip((out, *found), (wanted.detach(), *gradients), strict=True):
        torch.testing.assert_close(f, w, rtol=1e-11, atol=1e-11)
    scores = (q @ k.repeat_interleave(3, 1).transpose(-1, -2) * 0.3).masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)


def test_rows_without_keys():
    q, k, v, dout = inputs((1, 2, 2, 3, 3, 4))
    kernel = ReferenceKernel()
    out, lse = kernel.forward(q, k[:, :, :0], v[:, :, :0], False, 1.0)
    assert torch.equal(out, torch.zeros_like(q)) and torch.all(lse == -torch.inf)
    dq, dk, dv = kernel.backward(dout, q, k[:, :, :0], v[:, :, :0], out, lse, False, 1.0)
    assert torch.equal(dq, torch.zeros_like(q)) and dk.numel() == dv.numel() == 0


def test_selection():
    assert select_kernel(CPU, torch.float32, 8).name == "torch-cpu"
    assert select_kernel(CPU, torch.float32, 8, "reference").name == "reference"
    assert select_kernel(torch.device("meta"), torch.float32, 8).name == "reference"
    with pytest.raises(UPipeError, match=r"no attention kernel serves torch.int64 .*reference: torch.int64 is not"):
        select_kernel(CPU, torch.int64, 8)
    with pytest.raises(UPipeError, match=r"--upipe-attention-backend fast does not exist; choose auto, flash-attn-3, "):
        select_kernel(CPU, torch.float32, 8, "fast")
    with pytest.raises(UPipeError, match=r"flash-attn-2 does not serve .* pip install 'flash-attn>=2.7'"):
        select_kernel(CPU, torch.bfloat16, 8, "flash-attn-2")
    assert select_kernel(CPU, torch.float32, 8, window=True).name == "torch-cpu"
    with pytest.raises(UPipeError, match=r"transformer-engine does not serve .* has no sliding window"):
        select_kernel(CPU, torch.bfloat16, 8, "transformer-engine", window=True)
    with pytest.raises(UPipeError, match=r"torch-flash does not serve .*: needs CUDA tensors; auto chooses one"):
        select_kernel(CPU, torch.bfloat16, 8, "torch-flash")


def test_reasons_of_the_faster_ones():
    kernel = select_kernel(CPU, torch.float32, 8)
    reasons = passed_over(kernel, CPU, torch.float32, 8)
    assert len(reasons) == 6 and all(": " in reason for reason in reasons)
    assert reasons[4] == "torch-flash: needs CUDA tensors"
