"""FP8 attention: errors of the twins, and the ring, whose gradients must be those of one rank up to FP8's noise."""

import pytest
import torch
import torch.distributed as dist
from kernels.test_kernels import expected, inputs

from megatron_upipe.context.layout import SequenceLayout
from megatron_upipe.context.pieces import RingMask
from megatron_upipe.context.ring import ring_backward, ring_forward
from megatron_upipe.context.segments import one_document
from megatron_upipe.errors import UPipeError
from megatron_upipe.kernels.fp8_twin import Fp8TwinForward, Fp8TwinMxfp8
from megatron_upipe.kernels.reference import ReferenceKernel
from megatron_upipe.kernels.select import fp8_kernel

TWINS = {"forward": Fp8TwinForward(ReferenceKernel()), "full": Fp8TwinMxfp8()}
SHAPE = (2, 6, 2, 64, 64, 32)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def error(found, wanted):
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("mode", TWINS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_errors(mode, causal, dtype):
    q, k, v, dout = inputs(SHAPE, dtype)
    wanted = expected(q, k, v, dout, causal, 0.2)
    out, lse = TWINS[mode].forward(q, k, v, causal, 0.2)
    gradients = TWINS[mode].backward(dout, q, k, v, out, lse, causal, 0.2)
    assert out.dtype == dtype and lse.dtype == torch.promote_types(dtype, torch.float32)
    assert 0.02 < error(out, wanted[0]) < 0.08
    for found, want in zip(gradients, wanted[1:], strict=True):
        assert 0.005 < error(found, want) < 0.1


@pytest.mark.parametrize("mode", TWINS)
def test_rows_without_keys(mode):
    q, k, v, dout = inputs((1, 2, 2, 3, 3, 4))
    k, v = k[:, :, :0], v[:, :, :0]
    out, lse = ReferenceKernel().forward(q, k, v, False, 1.0)
    if mode == "full":
        out, lse = TWINS[mode].forward(q, k, v, False, 1.0)
    assert torch.equal(out, torch.zeros_like(q)) and torch.all(lse == -torch.inf)
    dq, *_ = TWINS[mode].backward(dout, q, k, v, out, lse, False, 1.0)
    assert torch.equal(dq, torch.zeros_like(q))


def test_values_of_zero():
    q, k, v, _ = inputs(SHAPE)
    for twin in TWINS.values():
        out, lse = twin.forward(q, k, torch.zeros_like(v), True, 0.2)
        assert torch.equal(out, torch.zeros_like(out)) and torch.isfinite(lse).all()


def _ring(rank, mode, causal):
    """(error against exact, the same of one rank alone) for out, dq, dk, dv."""
    group = dist.group.WORLD
    layout, length = SequenceLayout(1, group.size()), 64 * group.size()
    mine = [i for half in layout.positions(rank, length) for i in half]
    q, k, v, dout = inputs((2, 6, 2, length, length, 32))
    wanted = expected(q, k, v, dout, causal, 0.2)
    kernel, mask = TWINS[mode], RingMask(one_document(layout, length), causal)
    out, lse = kernel.forward(q, k, v, causal, 0.2)
    alone = (out, *kernel.backward(dout, q, k, v, out, lse, causal, 0.2))
    local_q, local_dout, kv = q[:, :, mine], dout[:, :, mine], torch.cat((k, v), 1)[:, :, mine]
    out, lse = ring_forward(kernel, local_q, kv, mask, 0.2, group)
    dq, rest = ring_backward(kernel, local_dout, local_q, kv, out, lse, mask, 0.2, group)
    ours = (out, dq, *rest())
    pick = [t[:, :, mine] for t in wanted]
    one = [t[:, :, mine] for t in alone]
    return [(error(a, w), error(b, w)) for a, b, w in zip(ours, one, pick, strict=True)]


@pytest.mark.parametrize("mode", TWINS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_ring_gradients_are_those_of_one_rank(workers, size, causal, mode):
    """What TransformerEngine's own ring gets wrong by more than 90 % in dK and dV."""
    for errors in workers.run(size, _ring, mode, causal):
        for ring, alone in errors:
            assert 0 < ring < 0.1 and ring < 1.5 * alone, errors


def test_selection(monkeypatch):
    base = ReferenceKernel()
    assert fp8_kernel("off", base, CUDA, torch.bfloat16, 64) is base
    assert fp8_kernel("forward", base, CPU, torch.bfloat16, 64) == TWINS["forward"]
    assert fp8_kernel("full", base, CPU, torch.bfloat16, 64) == TWINS["full"]
    monkeypatch.setattr("megatron_upipe.kernels.te_fp8.refuses_te", lambda: None)
    for capability, serves, instead in (((9, 0), "forward", "forward"), ((10, 0), "full", "full")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert "transformer-engine" in fp8_kernel(serves, base, CUDA, torch.bfloat16, 64).name
        other = {"forward": "full", "full": "forward"}[serves]
        with pytest.raises(UPipeError, match=f"--upipe-fp8-attention {other} does not serve .*; use {instead}, or off"):
            fp8_kernel(other, base, CUDA, torch.bfloat16, 64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UPipeError, match=r"compute capability 8\.0 is not supported; use off"):
        fp8_kernel("forward", base, CUDA, torch.bfloat16, 64)
