"""The FP8 twin by itself: bounds, scales, pieces of weights, sums."""

import pytest
import torch

from megatron_upipe.precision.plain import PLAIN
from megatron_upipe.precision.protocol import Weight
from megatron_upipe.precision.recipes import ALIGNMENT, Fp8Recipe
from megatron_upipe.precision.twin import E4M3, E5M2, TwinPrecision, quantise_blocks, quantise_tensor

ALL = [Fp8Recipe(name, hybrid) for name in ALIGNMENT for hybrid in (True, False)]


def tensors(dtype=torch.bfloat16):
    torch.manual_seed(0)
    x = torch.randn(384, 256, dtype=dtype)
    return x, torch.randn(512, 256, dtype=dtype), torch.randn(384, 512, dtype=dtype)


def error(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("recipe", ALL, ids=Fp8Recipe.describe)
def test_errors_of_products(recipe):
    """Of normally distributed numbers; E4M3 keeps 3 bits after the first, E5M2 2."""
    x, w, dy = tensors()
    twin = TwinPrecision(recipe)
    weight, tokens, gradient = Weight(w, twin), twin.tokens(x, True, True), twin.gradient(dy)
    backward = 0.065 if recipe.hybrid else 0.04
    assert 0.03 < error(twin.product(tokens, weight.rows()), x.double() @ w.double().t()) < 0.04
    assert 0.03 < error(twin.input_gradient(gradient, weight.rows(backward=True)), dy.double() @ w.double()) < backward
    found = twin.weight_gradient(gradient, tokens, torch.float32)
    assert found.dtype == torch.float32 and 0.03 < error(found, dy.double().t() @ x.double()) < backward


@pytest.mark.parametrize("recipe", ALL, ids=Fp8Recipe.describe)
def test_pieces_of_a_weight_give_the_same_bits_as_the_whole(recipe):
    x, w, dy = tensors(torch.float32)
    twin = TwinPrecision(recipe)
    weight, tokens, gradient = Weight(w, twin), twin.tokens(x, True, True), twin.gradient(dy)
    rows = [lambda t, i=i: t[i * 128 : (i + 1) * 128] for i in (2, 0, 3, 1)]
    whole = twin.product(tokens, weight.rows())
    pieces = twin.product(tokens, weight.rows(*rows[:2])), twin.product(tokens, weight.rows(*rows[2:]))
    found = torch.cat(pieces, 1).split(128, 1)
    assert torch.equal(torch.cat([found[i] for i in (1, 3, 0, 2)], 1), whole)
    whole = twin.input_gradient(gradient, weight.rows(backward=True))
    columns = [lambda t, i=i: t[:, i * 128 : (i + 1) * 128] for i in range(2)]
    pieces = [twin.input_gradient(gradient, weight.columns(part)) for part in columns]
    assert torch.equal(torch.cat(pieces, 1), whole)


def test_a_piece_alone_has_another_scale():
    """So that the test above is about the shared one."""
    x, w, _ = tensors(torch.float32)
    twin = TwinPrecision(ALL[0])
    tokens = twin.tokens(x, True, False)
    alone = twin.product(tokens, Weight(w[:128].contiguous(), twin).rows())
    assert not torch.equal(alone, twin.product(tokens, Weight(w, twin).rows())[:, :128])


def test_a_weight_is_quantised_once(monkeypatch):
    _, w, _ = tensors()
    twin, shared = TwinPrecision(ALL[0]), []
    monkeypatch.setattr(TwinPrecision, "share", lambda self, p, f=TwinPrecision.share: shared.append(p) or f(self, p))
    weight = Weight(w, twin)
    for _ in range(3):
        weight.rows(lambda t: t[:64])
    assert len(shared) == 1


@pytest.mark.parametrize("precision", [PLAIN, *(TwinPrecision(recipe) for recipe in ALL)], ids=lambda p: p.describe())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums(precision, dtype):
    """With a total, products are added to it in its own precision."""
    x, w, dy = tensors()
    weight = Weight(w, precision)
    tokens, gradient = precision.tokens(x, True, True), precision.gradient(dy)
    for product, shape in (
        (lambda t: precision.input_gradient(gradient, weight.rows(backward=True), t), x.shape),
        (lambda t: precision.weight_gradient(gradient, tokens, dtype, t), w.shape),
    ):
        once = product(torch.zeros(shape, dtype=dtype))
        total = torch.full(shape, 7.0, dtype=dtype)
        assert product(total) is total
        torch.testing.assert_close(total, once + 7, rtol=0.01, atol=0.1 if dtype == torch.bfloat16 else 1e-3)


def test_bias():
    x, w, _ = tensors(torch.float64)
    for precision in (PLAIN, *map(TwinPrecision, ALL)):
        weight, bias = Weight(w, precision), torch.arange(512, dtype=torch.float64)
        tokens = precision.tokens(x, True, False)
        added = precision.product(tokens, weight.rows(), bias) - precision.product(tokens, weight.rows())
        torch.testing.assert_close(added, bias.expand(384, -1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [0.0, 1e-36, 1e-20, 1.0, 1e30])
def test_any_magnitude(dtype, size):
    """Nothing overflows; the largest value is kept to the format's precision."""
    torch.manual_seed(1)
    x = torch.randn(40, 70) * size
    for quantised in (
        quantise_tensor(x, dtype),
        quantise_blocks(x, dtype, (1, 32), mx=True),
        quantise_blocks(x, dtype, (128, 1), mx=False),
        quantise_blocks(x, dtype, (128, 128), mx=False),
    ):
        found = quantised.values() * quantised.factor()
        assert torch.isfinite(found).all() and quantised.data.element_size() == 1
        assert (found - x).abs().max() <= x.abs().max() * (2**-4 if dtype == E4M3 else 2**-3)


def test_block_scales_are_powers_of_two_that_fit():
    torch.manual_seed(1)
    x = torch.randn(64, 64) * torch.exp(5 * torch.randn(64, 64))
    for mx in (True, False):
        scale = quantise_blocks(x, E4M3, (1, 32), mx).scale_inv
        mantissa, _ = torch.frexp(scale)
        assert torch.equal(mantissa, torch.full_like(mantissa, 0.5))
        amax = x.view(64, 2, 32).abs().amax(2)
        assert (amax / scale <= 448).all() and (amax / scale > 448 / 2 * 0.999).all()


def test_mxfp8_keeps_small_blocks_beside_large_ones():
    x = torch.cat((torch.randn(4, 32), torch.randn(4, 32) * 1e-6), 1)
    assert error(quantise_blocks(x, E4M3, (1, 32), mx=True).values()[:, 32:], x[:, 32:].double()) < 0.04
    tensor = quantise_tensor(x, E4M3)
    assert error((tensor.values() * tensor.factor())[:, 32:], x[:, 32:].double()) > 0.5
