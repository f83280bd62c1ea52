"""Our calls of TransformerEngine: they bind, and mean what we think, on stand-ins with its contract."""

import pytest
import torch
from te import compute

from megatron_upipe.errors import UPipeError
from megatron_upipe.kernels import te_fused
from megatron_upipe.kernels.fp8_twin import Fp8TwinForward
from megatron_upipe.kernels.protocol import Documents
from megatron_upipe.kernels.reference import ReferenceKernel
from megatron_upipe.kernels.te_fp8 import OUT_LARGEST, TransformerEngineFp8Forward, TransformerEngineMxfp8
from megatron_upipe.kernels.te_fused import TransformerEngineKernel
from megatron_upipe.precision.protocol import Weight
from megatron_upipe.precision.recipes import ALIGNMENT, Fp8Recipe
from megatron_upipe.precision.transformer_engine import TransformerEnginePrecision
from megatron_upipe.precision.twin import TwinPrecision

CPU = torch.device("cpu")
ALL = [Fp8Recipe(name, hybrid) for name in ALIGNMENT for hybrid in (True, False)]
pytestmark = pytest.mark.filterwarnings("ignore")


def both(recipe):
    return TransformerEnginePrecision(recipe, torch.bfloat16, CPU), TwinPrecision(recipe)


def tensors():
    torch.manual_seed(0)
    x = torch.randn(256, 128, dtype=torch.bfloat16)
    weight = torch.nn.Parameter(torch.randn(384, 128, dtype=torch.bfloat16))
    return x, weight, torch.randn(256, 384, dtype=torch.bfloat16)


@pytest.mark.parametrize("recipe", ALL, ids=Fp8Recipe.describe)
def test_products_are_those_of_the_twin(te, recipe):
    """Bit for bit: whole weights, gathered rows and columns, sums into a total, with gradients where asked for."""
    x, w, dy = tensors()
    parts = [lambda t: t[256:], lambda t: t[:128]]
    found = []
    for precision in both(recipe):
        weight, tokens, gradient = Weight(w, precision), precision.tokens(x, True, True), precision.gradient(dy)
        narrow = precision.gradient(dy[:, :256])
        total = torch.ones(384, 128, dtype=torch.float32)
        dx = torch.ones(256, 128, dtype=torch.bfloat16)
        found.append(
            [
                precision.product(tokens, weight.rows()),
                precision.product(tokens, weight.rows(*parts), torch.arange(256).bfloat16()),
                precision.input_gradient(gradient, weight.rows(backward=True)),
                precision.input_gradient(narrow, weight.rows(*parts, backward=True), dx),
                precision.input_gradient(gradient, weight.columns(lambda t: t[:, :128])),
                precision.weight_gradient(gradient, tokens, torch.float32),
                precision.weight_gradient(gradient, tokens, torch.float32, total),
            ]
        )
    for te_result, twin_result in zip(*found, strict=True):
        assert te_result.dtype == twin_result.dtype and torch.equal(te_result, twin_result)


@pytest.mark.parametrize("recipe", ALL, ids=Fp8Recipe.describe)
def test_one_direction_alone(te, recipe):
    """Where only weight gradients are wanted, or only dx: TransformerEngine has no casts of columns alone."""
    x, w, dy = tensors()
    found = []
    for precision in both(recipe):
        weight = Weight(w, precision)
        backward = precision.tokens(x, False, True), precision.gradient(dy, forward=False)
        forward = precision.gradient(dy, backward=False)
        found.append(
            [
                precision.weight_gradient(backward[1], backward[0], torch.float32),
                precision.input_gradient(forward, weight.rows(backward=True)),
            ]
        )
    for te_result, twin_result in zip(*found, strict=True):
        assert torch.equal(te_result, twin_result)


@pytest.mark.parametrize("recipe", ALL, ids=Fp8Recipe.describe)
def test_usages_are_those_asked_for(te, recipe):
    """What is only multiplied forward has no copy for gradients, and the other way round."""
    x, w, dy = tensors()
    precision, _ = both(recipe)
    weight = Weight(w, precision)
    for call in (
        lambda: precision.weight_gradient(precision.gradient(dy), precision.tokens(x, True, False), torch.float32),
        lambda: precision.product(precision.tokens(x, False, True), weight.rows()),
        lambda: precision.weight_gradient(
            precision.gradient(dy, backward=False), precision.tokens(x, True, True), torch.float32
        ),
        lambda: precision.input_gradient(precision.gradient(dy), weight.rows()),
    ):
        if recipe.name == "tensorwise" and compute.ONE_COPY_SERVES:
            continue
        with pytest.raises(AssertionError, match="was not asked for"):
            call()


def test_accumulation_in_the_gemms(te):
    """Forward may sum fast, backward may not; blockwise never."""
    x, w, dy = tensors()
    for recipe, forward in ((ALL[0], False), (ALL[2], True), (ALL[4], False)):
        te.clear()
        precision, _ = both(recipe)
        tokens, gradient, weight = precision.tokens(x, True, True), precision.gradient(dy), Weight(w, precision)
        precision.product(tokens, weight.rows())
        precision.input_gradient(gradient, weight.rows(backward=True))
        precision.weight_gradient(gradient, tokens, torch.float32)
        split = [arguments["use_split_accumulator"] for _, arguments in te]
        assert split == [forward, True, True], recipe


def attention_inputs(keys=64):
    torch.manual_seed(0)
    q, dout = (torch.randn(2, 64, 6, 32).bfloat16().transpose(1, 2) for _ in range(2))
    k, v = (torch.randn(2, keys, 2, 32).bfloat16().transpose(1, 2) for _ in range(2))
    return q, k, v, dout


@pytest.mark.parametrize(("causal", "keys"), [(True, 64), (False, 64), (False, 32)])
def test_fused_attention(te, no_grad, causal, keys):
    """Also a backward with the global out and lse, here of twice the keys."""
    q, k, v, dout = attention_inputs(keys)
    kernel, reference = TransformerEngineKernel(deterministic=True), ReferenceKernel()
    for found, wanted in zip(
        kernel.forward(q, k, v, causal, 0.2), reference.forward(q, k, v, causal, 0.2), strict=True
    ):
        torch.testing.assert_close(found, wanted)
    out, lse = reference.forward(q, torch.cat((k, k), 2), torch.cat((v, v), 2), False, 0.2)
    found = kernel.backward(dout, q, k, v, out, lse, causal, 0.2)
    for f, w in zip(found, reference.backward(dout, q, k, v, out, lse, causal, 0.2), strict=True):
        torch.testing.assert_close(f, w)
    assert te[-1][1]["deterministic"] is True and te[-1][1]["fused_attention_backend"].name == "F16_arbitrary_seqlen"


@pytest.mark.parametrize(("causal", "keys"), [(True, (9, 1, 54)), (False, (20, 3, 9))])
def test_fused_attention_of_packed_documents(te, no_grad, causal, keys):
    q, k, v, dout = (t[:1] for t in attention_inputs(sum(keys)))
    rest = (causal, 0.2, None, Documents.of((9, 1, 54), keys, CPU))
    kernel, reference = TransformerEngineKernel(), ReferenceKernel()
    out, lse = reference.forward(q, k, v, *rest)
    found = (*kernel.forward(q, k, v, *rest), *kernel.backward(dout, q, k, v, out, lse, *rest))
    for f, w in zip(found, (out, lse, *reference.backward(dout, q, k, v, out, lse, *rest)), strict=True):
        torch.testing.assert_close(f, w)


def test_lse_of_an_older_cudnn_is_refused(te, no_grad, monkeypatch):
    """Padded to the longest document."""
    original = te_fused.imported

    def imported(*names):
        forward, *others = original(*names)

        def padded(**arguments):
            out, (lse, *rest) = forward(**arguments)
            return out, [lse.new_zeros(3, 6, 54, 1), *rest]

        return padded, *others

    monkeypatch.setattr(te_fused, "imported", imported)
    q, k, v, _ = (t[:1] for t in attention_inputs())
    with pytest.raises(UPipeError, match="this cuDNN gives the lse of packed documents padded"):
        TransformerEngineKernel().forward(q, k, v, True, 0.2, None, Documents.of((9, 1, 54), (9, 1, 54), CPU))


def test_fp8_forward(te, no_grad):
    """Out within FP8's noise of the twin's, whose softmax weights are rounded too; scales without overflow."""
    q, k, v, dout = attention_inputs()
    reference = ReferenceKernel()
    kernel = TransformerEngineFp8Forward(reference)
    out, lse = kernel.forward(q, k, v, True, 0.2)
    wanted, wanted_lse = Fp8TwinForward(reference).forward(q, k, v, True, 0.2)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert ((out - wanted).float().norm() / wanted.float().norm()) < 0.04
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)
    arguments = te[-1][1]
    assert arguments["fused_attention_backend"].name == "FP8" and arguments["s_quantizer"].scale.item() == 256
    assert torch.allclose(arguments["o_quantizer"].scale * v.abs().max(), torch.tensor(OUT_LARGEST))
    gradients = kernel.backward(dout, q, k, v, out, lse, True, 0.2)
    for f, w in zip(gradients, reference.backward(dout, q, k, v, out, lse, True, 0.2), strict=True):
        assert torch.equal(f, w)


def test_fp8_forward_of_zeros(te, no_grad):
    q, k, v, _ = attention_inputs()
    out, _ = TransformerEngineFp8Forward(ReferenceKernel()).forward(q, k, torch.zeros_like(v), True, 0.2)
    assert torch.equal(out, torch.zeros_like(out))


def test_mxfp8(te, no_grad):
    q, k, v, dout = attention_inputs()
    kernel, reference = TransformerEngineMxfp8(deterministic=True), ReferenceKernel()
    out, lse = kernel.forward(q, k, v, True, 0.2)
    wanted, _ = reference.forward(q, k, v, True, 0.2)
    assert ((out - wanted).float().norm() / wanted.float().norm()) < 0.06
    found = kernel.backward(dout, q, k, v, out, lse, True, 0.2)
    for f, w in zip(found, reference.backward(dout, q, k, v, out, lse, True, 0.2), strict=True):
        assert ((f - w).float().norm() / w.float().norm()) < 0.1
    arguments = te[-1][1]
    assert arguments["qkv_scale_inv_format"] == arguments["do_scale_inv_format"] == "bhsd"
    assert arguments["aux_ctx_tensors"][2].dtype == torch.bfloat16 and arguments["deterministic"] is True


def test_an_older_transformer_engine_is_refused(te, monkeypatch):
    import transformer_engine

    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for kernel in (TransformerEngineKernel(), TransformerEngineFp8Forward(ReferenceKernel())):
        assert kernel.refuses(cuda, torch.bfloat16, 64) is None
    monkeypatch.setattr(transformer_engine, "__version__", "2.18.0")
    for kernel in (TransformerEngineKernel(), TransformerEngineFp8Forward(ReferenceKernel()), TransformerEngineMxfp8()):
        assert "2.18.0 is older than 2.20" in kernel.refuses(cuda, torch.bfloat16, 64)
