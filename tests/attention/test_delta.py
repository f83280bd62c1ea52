"""What stands for the output in backward: its products with the gradient, and nothing lost on the way."""

import pytest
import torch

from megatron_upipe.attention import delta
from megatron_upipe.context.merge import accumulation_dtype


def made(dtype, scale=1.0, tokens=37):
    torch.manual_seed(3)
    dout, out = (torch.randn(tokens, 2, 3, 16, dtype=torch.float64) for _ in range(2))
    dout[5] = 0
    return (dout * scale).to(dtype), out.to(dtype)


def there_and_back(dout, out):
    """As the exchange brings them: [s, b, n, d] -> [b, n, L, d]."""
    to_heads = lambda t: t.permute(1, 2, 0, 3).contiguous()  # noqa: E731
    travelling = to_heads(delta.as_elements(delta.deltas(dout, out), dout.dtype))
    return to_heads(dout), delta.out_with_delta(to_heads(dout), delta.from_elements(travelling))


@pytest.mark.parametrize("tile", [2**22, 64])
@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e-34, 1e20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_products_are_those_of_the_output(dtype, scale, tile, monkeypatch):
    if dtype == torch.float16:
        scale = min(max(scale, 1e-3), 1e2)
    monkeypatch.setattr(delta, "TILE", tile)
    dout, out = made(dtype, scale)
    wanted = (dout.double() * out.double()).sum(-1).permute(1, 2, 0)
    heads, instead = there_and_back(dout, out)
    found = (heads.double() * instead.double()).sum(-1)
    lengths = (heads.double().norm(dim=-1) * out.double().permute(1, 2, 0, 3).norm(dim=-1)).clamp(min=1e-300)
    precision = {torch.float64: 1e-14, torch.float32: 1e-6}.get(dtype, torch.finfo(dtype).eps)
    assert ((found - wanted).abs() / lengths).max() < precision
    assert (instead[:, :, 5] == 0).all()
    # never longer than the output itself, so that nothing overflows where it did not
    assert (instead.double().norm(dim=-1) <= out.double().permute(1, 2, 0, 3).norm(dim=-1) * 1.01).all()


def test_one_number_travels_for_each_row():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        dout, out = made(dtype)
        sent = delta.as_elements(delta.deltas(dout, out), dtype)
        assert sent.dtype == dtype
        assert sent.nbytes == dout[..., :1].numel() * accumulation_dtype(dtype).itemsize


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad):
    dout, out = made(torch.float32)
    out[7, 1, 2, 3] = bad
    _, instead = there_and_back(dout, out)
    assert not instead[1, 2, 7].isfinite().all()
    assert instead[0].isfinite().all()
