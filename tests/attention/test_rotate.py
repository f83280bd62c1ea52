"""RoPE on the way to the exchange: the Triton kernel (in Triton's interpreter), its twin, and Megatron's own."""

import os
import subprocess
import sys

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from megatron_upipe.attention.rotate import Rotated, Rotation, rotate_twin
from megatron_upipe.context.exchange import start_to_heads

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def made(dtype, d=10, r=10, tokens=7, scale=1.0):
    torch.manual_seed(4)
    angles = torch.rand(tokens, 1, 1, r // 2) * 6
    angles = torch.cat((angles, angles), -1)
    return torch.randn(tokens, 2, 3, 2, d).to(dtype), angles, Rotation.of(angles, scale, dtype)


@pytest.mark.parametrize("r", [10, 6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_twin_has_the_bits_of_megatron_there_and_back(dtype, r):
    source, angles, rotation = made(dtype, r=r, scale=1.3)
    flat = source.flatten(2, 3).requires_grad_()
    wanted = _apply_rotary_pos_emb_bshd(flat, angles, mscale=1.3)
    found = torch.empty_like(source)
    rotate_twin(source, found, rotation)
    assert torch.equal(found.flatten(2, 3), wanted)
    cotangent = torch.randn(source.shape).to(dtype)
    (gradient,) = torch.autograd.grad(wanted, flat, cotangent.flatten(2, 3))
    rotate_twin(cotangent, found, rotation, back=True)
    assert torch.equal(found.flatten(2, 3), gradient)


@pytest.mark.parametrize("together", [1, 2])
def test_is_written_where_it_is_packed(workers, together):
    assert all(workers.run(2, _packed, together)) and all(workers.run(1, _packed, together))


def _packed(rank, together):
    import torch.distributed as dist

    from megatron_upipe.context.transport import TorchTransport

    p = dist.get_world_size()
    _, _, rotation = made(torch.float32, tokens=6)
    torch.manual_seed(rank)
    raw, other = torch.randn(6, 2, p * 3, 10), torch.randn(6, 2, p, 4)
    before = torch.empty(6, 2, p * 3, 1, 10)
    rotate_twin(raw.unsqueeze(3), before, rotation)
    transport = TorchTransport(dist.group.WORLD) if p > 1 else None
    found = start_to_heads([Rotated(raw, rotation), other][:together], transport)()
    wanted = start_to_heads([before.squeeze(3), other][:together], transport)()
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def interpreted(name):
    """Runs a function of this file in a process with Triton's interpreter."""
    pytest.importorskip("triton")
    code = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import test_rotate; test_rotate.{name}()"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_triton_kernel_has_the_bits_of_its_twin():
    interpreted("kernel_equals_twin")


def kernel_equals_twin():
    from megatron_upipe.attention.rotate_triton import rotate

    sizes = [(10, 10), (10, 6), (16, 16), (5, 2)]
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for d, r in sizes if dtype == torch.bfloat16 else sizes[1:2]:
            source, angles, rotation = made(dtype, d=d, r=r)
            fused = Rotation.of(angles, 1.0, torch.promote_types(dtype, torch.float32))
            # as the exchange has them: [P, s, b, n, d] in a wider buffer
            buffer = torch.full((3, 7, 2, 2 * d + 5), 9.0, dtype=dtype)
            for rotations, back in [(one, way) for one in (rotation, fused) for way in (False, True)]:
                target = buffer[..., 3 : 3 + 2 * d].unflatten(3, (2, d)).permute(1, 2, 0, 3, 4)
                wanted = torch.empty_like(source)
                rotate_twin(source, wanted, rotations, back)
                rotate(source, target, rotations.cos, rotations.sin, back)
                assert torch.equal(target, wanted), (dtype, d, r, back)
                assert (buffer[..., :3] == 9).all() and (buffer[..., 3 + 2 * d :] == 9).all()
                strided = source.permute(4, 3, 2, 1, 0).contiguous().permute(4, 3, 2, 1, 0)
                rotate(strided, target, rotations.cos, rotations.sin, back)
                assert torch.equal(target, wanted)


def test_index_arithmetic_past_2_to_the_31():
    interpreted("kernel_past_2_to_the_31")


def kernel_past_2_to_the_31():
    """Tensors of more elements, of which a few are touched: memory that is not written to costs nothing."""
    from megatron_upipe.attention.rotate_triton import rotate

    source, _, rotation = made(torch.bfloat16, d=8, r=8, tokens=5)
    wanted = torch.empty_like(source)
    rotate_twin(source, wanted, rotation)
    stride = 2**29 + 64
    huge = [torch.empty(4 * stride + 2**10, dtype=torch.bfloat16) for _ in range(2)]
    views = [t.as_strided(source.shape, (stride, 48, 16, 8, 1)) for t in huge]
    assert huge[0].numel() > 2**31
    views[0].copy_(source)
    rotate(*views, rotation.cos, rotation.sin, False)
    assert torch.equal(views[1], wanted)
    # tables as far away, too
    tables = [torch.empty(4 * stride + 2**10, dtype=torch.bfloat16).as_strided((5, 8), (stride, 1)) for _ in range(2)]
    for table, values in zip(tables, (rotation.cos, rotation.sin), strict=True):
        table.copy_(values)
    views[1].zero_()
    rotate(*views, *tables, False)
    assert torch.equal(views[1], wanted)


def _module(rank, dtype):
    from attention.test_overlap import _build, _pass

    from megatron_upipe.attention import module as attention_module

    module, x, table = _build("dense", rank, dtype)
    wanted = _pass(module, x, table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_module, "serves", lambda *inputs: True)  # by the twin: there is no GPU
        call = module.call(x, table)
        assert call.elementwise.rotation is not None
        found = _pass(module, x, table)
    assert module.call(x, table).elementwise.rotation is None
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_attention_has_the_same_bits(workers, dtype):
    assert workers.run(2, _module, dtype) == [True, True]
