"""Adapters of GPU backends: stand-ins with the recorded signatures of the real packages, and torch's meta kernels."""

import inspect
import sys
from types import ModuleType

import pytest
import torch
from kernels import recorded

from megatron_upipe.kernels import torch_cudnn, torch_flash
from megatron_upipe.kernels.conventions import fp32_dq_bytes, refuses_on_gpu
from megatron_upipe.kernels.flash_attn_2 import FlashAttn2Kernel
from megatron_upipe.kernels.flash_attn_3 import FlashAttn3Kernel
from megatron_upipe.kernels.flash_attn_4 import FlashAttn4Kernel
from megatron_upipe.kernels.protocol import Documents
from megatron_upipe.kernels.reference import ReferenceKernel
from megatron_upipe.kernels.select import select_kernel

FLASH = (FlashAttn2Kernel(), FlashAttn3Kernel(), FlashAttn4Kernel())
TORCH = (torch_flash.TorchFlashKernel(), torch_cudnn.TorchCudnnKernel())
CUDA = torch.device("cuda")


@pytest.fixture
def packages(monkeypatch):
    """The flash-attention packages, as far as they are recorded."""
    for name, functions in recorded.MODULES.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(parts[depth - 1]))
        for function, stand_in in functions.items():
            setattr(sys.modules[name], function, stand_in)
    # flash-attn 2 and 4 share the top package: the last loop has replaced it
    recorded.CALLS.clear()


def inputs(l=17, keys=17):
    torch.manual_seed(0)
    q, dout = (torch.randn(2, l, 6, 8, dtype=torch.float64).transpose(1, 2) for _ in range(2))
    k, v = (torch.randn(2, keys, 2, 8, dtype=torch.float64).transpose(1, 2) for _ in range(2))
    return q, k, v, dout


@pytest.mark.parametrize("kernel", FLASH, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(("causal", "keys"), [(True, 17), (False, 17), (False, 9)])
def test_layouts_and_results(packages, kernel, causal, keys):
    """Also a backward with the global out and lse, here of twice the keys."""
    q, k, v, dout = inputs(keys=keys)
    reference = ReferenceKernel()
    wanted = reference.forward(q, k, v, causal, 0.3)
    found = kernel.forward(q, k, v, causal, 0.3)
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, w)
    out, lse = reference.forward(q, torch.cat((k, k), 2), torch.cat((v, v), 2), False, 0.3)
    wanted = reference.backward(dout, q, k, v, out, lse, causal, 0.3)
    for f, w in zip(kernel.backward(dout, q, k, v, out, lse, causal, 0.3), wanted, strict=True):
        torch.testing.assert_close(f, w)
    for call in recorded.CALLS:
        assert not any(call.get(name) for name in ("dropout_p", "alibi_slopes", "cu_seqlens_q", "learnable_sink"))
        assert call["window_size_left"] in (-1, None) and call["window_size_right"] in (-1, None)


# causal, left, lengths of documents (queries, keys)
MASKS = [
    (True, 3, None),
    (False, 2, None),
    (True, None, ((5, 1, 11), (5, 1, 11))),
    (False, None, ((5, 1, 11), (9, 4, 4))),
    (True, 4, ((5, 1, 11), (5, 1, 11))),
    (False, 1, ((5, 1, 11), (6, 2, 13))),
]


def compare_masks(kernel, mask, rtol=None):
    """Results of ``kernel`` under a mask with the reference's."""
    causal, left, lengths = mask
    documents = None if lengths is None else Documents.of(*lengths, torch.device("cpu"))
    q, k, v, dout = (t[:1] for t in inputs(keys=17 if lengths is None else sum(lengths[1])))
    rest = (causal, 0.3, left, documents)
    reference = ReferenceKernel()
    out, lse = reference.forward(q, k, v, *rest)
    tolerance = {} if rtol is None else dict(rtol=rtol, atol=rtol)
    found = (*kernel.forward(q, k, v, *rest), *kernel.backward(dout, q, k, v, out, lse, *rest))
    for f, w in zip(found, (out, lse, *reference.backward(dout, q, k, v, out, lse, *rest)), strict=True):
        torch.testing.assert_close(f, w, **tolerance)


@pytest.mark.parametrize("kernel", FLASH, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_windows_and_documents(packages, kernel, mask):
    compare_masks(kernel, mask)


@pytest.mark.parametrize("kernel", FLASH, ids=lambda kernel: kernel.name)
def test_rows_without_keys(packages, kernel):
    """These packages give them +inf."""
    q, k, v, _ = inputs()
    out, lse = kernel.forward(q, k[:, :, :0], v[:, :, :0], False, 0.3)
    assert torch.equal(out, torch.zeros_like(q)) and torch.all(lse == -torch.inf)


@pytest.mark.parametrize("kernel", FLASH, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("deterministic", [False, True])
def test_determinism_is_handed_on(packages, monkeypatch, kernel, deterministic):
    monkeypatch.setattr(type(kernel), "refuses", lambda *_: None)
    chosen = select_kernel(CUDA, torch.bfloat16, 8, kernel.name, deterministic)
    q, k, v, dout = inputs()
    chosen.backward(dout, q, k, v, *chosen.forward(q, k, v, True, 0.3), True, 0.3)
    assert recorded.CALLS[-1]["deterministic"] is deterministic


@pytest.mark.parametrize("kernel", FLASH, ids=lambda kernel: kernel.name)
def test_a_missing_package_says_how_to_get_it(kernel):
    reason = kernel.refuses(CUDA, torch.bfloat16, 64)
    assert "cannot be imported" in reason and ("pip install" in reason or "build it" in reason)


def test_a_package_without_the_function(packages, monkeypatch):
    monkeypatch.delattr(sys.modules["flash_attn_interface"], "_flash_attn_backward")
    assert "flash_attn_interface has no _flash_attn_backward" in FLASH[1].refuses(CUDA, torch.bfloat16, 64)


@pytest.mark.parametrize(
    ("kernel", "capability", "serves"),
    [
        (FLASH[0], (8, 0), True),
        (FLASH[0], (7, 5), False),
        (FLASH[1], (9, 0), True),
        (FLASH[1], (10, 0), False),
        (FLASH[2], (10, 0), True),
        (FLASH[2], (8, 0), False),
        (TORCH[0], (8, 0), True),
        (TORCH[1], (9, 0), True),
        (TORCH[1], (8, 0), False),
    ],
)
def test_devices(packages, monkeypatch, kernel, capability, serves):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    assert (kernel.refuses(CUDA, torch.bfloat16, 128) is None) is serves
    assert "needs CUDA" in kernel.refuses(torch.device("cpu"), torch.bfloat16, 128)
    assert "bf16 and fp16" in kernel.refuses(CUDA, torch.float32, 128)
    assert "multiples of 8" in kernel.refuses(CUDA, torch.bfloat16, 132)
    assert "up to" in kernel.refuses(CUDA, torch.bfloat16, 512)


@pytest.mark.parametrize("kernel", TORCH, ids=lambda kernel: kernel.name)
def test_torchs_operations_take_our_arguments(kernel):
    """On meta tensors: the operation's own schema and shapes."""
    q, dout = (torch.empty(2, 256, 6, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2) for _ in range(2))
    k, v = (torch.empty(2, 256, 2, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2) for _ in range(2))
    out, lse = kernel.forward(q, k, v, True, 0.1)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 6, 256), torch.float32)
    gradients = kernel.backward(dout, q, k, v, out, lse, True, 0.1)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_torchs_operations_take_windows_and_documents(mask):
    causal, left, lengths = mask
    documents = None if lengths is None else Documents.of(*lengths, torch.device("meta"))
    tokens = (17, 17) if lengths is None else tuple(map(sum, lengths))
    q, dout = (torch.empty(1, tokens[0], 6, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2) for _ in range(2))
    k, v = (torch.empty(1, tokens[1], 2, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2) for _ in range(2))
    kernel = TORCH[0]
    out, lse = kernel.forward(q, k, v, causal, 0.1, left, documents)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    gradients = kernel.backward(dout, q, k, v, out, lse, causal, 0.1, left, documents)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]


class _Operations:
    """torch.ops.aten with the two CUDA operations computed by the reference; arguments are checked by their schema."""

    def __init__(self, lse_dimensions):
        self._lse_dimensions = lse_dimensions

    def __getattr__(self, name):
        schema = getattr(torch.ops.aten, name).default._schema
        names = [argument.name for argument in schema.arguments]

        def call(*args, **kwargs):
            given = dict(zip(names, args, strict=False)) | kwargs
            assert set(kwargs) <= set(names) and given["dropout_p"] == 0.0
            if name.startswith("_flash_attention"):
                return self._tokens_first(given)
            for sequences in ("cum_seq_q", "cum_seq_k", "attn_bias"):
                assert given.get(sequences) is None, "a defined tensor would mean packed documents, or a bias"
            reference, common = ReferenceKernel(), (given["is_causal"], given["scale"])
            q, k, v = given["query"], given["key"], given["value"]
            extra = "cudnn" in name and self._lse_dimensions == 4
            if name.endswith("_backward"):
                assert given["logsumexp"].dim() == 3 + extra
                assert (given["max_q"], given["max_k"]) == (q.shape[2], k.shape[2])
                lse = given["logsumexp"].view(q.shape[:3])
                return reference.backward(given["grad_out"], q, k, v, given["out"], lse, *common)
            out, lse = reference.forward(q, k, v, *common)
            return out, lse.unsqueeze(-1) if extra else lse, None

        return call

    @staticmethod
    def _tokens_first(given):
        """``_flash_attention_forward`` and its backward are flash-attn 2 by other names."""
        packed = given["cum_seq_q"] is not None
        sequences = (given["cum_seq_q"], given["cum_seq_k"], (given["max_q"], given["max_k"]))
        masks = (given["is_causal"], given.get("window_size_left"), given.get("window_size_right"), *sequences)
        q, k, v = given["query"], given["key"], given["value"]
        assert packed or given["max_q"] == q.shape[1]
        if "grad_out" in given:
            return recorded._backward(
                given["grad_out"], q, k, v, given["out"], given["logsumexp"], given["scale"], *masks
            )
        return recorded._forward(q, k, v, given["scale"], *masks)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_torchs_flash_attention_with_windows_and_documents(monkeypatch, mask):
    monkeypatch.setattr(torch_flash, "_OPS", _Operations(3))
    compare_masks(TORCH[0], mask)


@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask[1] is None], ids=str)
def test_cudnn_takes_one_document_at_a_time(monkeypatch, mask):
    monkeypatch.setattr(torch_cudnn, "_OPS", _Operations(3))
    compare_masks(TORCH[1], mask)


@pytest.mark.parametrize(("kernel", "module"), list(zip(TORCH, (torch_flash, torch_cudnn), strict=True)))
@pytest.mark.parametrize("dimensions", [3, 4])
def test_torchs_operations_are_called_right(monkeypatch, kernel, module, dimensions):
    monkeypatch.setattr(module, "_OPS", _Operations(dimensions))
    q, k, v, dout = inputs()
    reference = ReferenceKernel()
    for f, w in zip(kernel.forward(q, k, v, True, 0.3), reference.forward(q, k, v, True, 0.3), strict=True):
        torch.testing.assert_close(f, w)
    out, lse = reference.forward(q, k, v, True, 0.3)
    found = kernel.backward(dout, q, k, v, out, lse, True, 0.3)
    for f, w in zip(found, reference.backward(dout, q, k, v, out, lse, True, 0.3), strict=True):
        torch.testing.assert_close(f, w)


def test_workspace():
    assert fp32_dq_bytes(2, 3, 129, 64) == 2 * 3 * 256 * 64 * 4
    assert refuses_on_gpu(torch.device("cpu"), torch.bfloat16, 64, range(8, 9)) == "needs CUDA tensors"
    for kernel in (*FLASH, *TORCH):
        assert kernel.workspace_bytes(1, 8, 128, 128) == 8 * 128 * 128 * 4
        assert list(inspect.signature(kernel.workspace_bytes).parameters) == ["batch", "heads", "tokens", "head_dim"]
