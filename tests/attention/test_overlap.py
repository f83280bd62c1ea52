"""Stages in a pipeline: the same bits as one by one, whatever comes late; and no rank left behind by a failure."""

import random
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_upipe.attention.pipeline import run_stages
from megatron_upipe.context import ring, transport
from megatron_upipe.context.layout import SequenceLayout
from megatron_upipe.integration.selftest.parity import (
    Case,
    initialize,
    local,
    rotary_table,
    single_rank_groups,
    stock_attention,
    upipe_attention,
)

CASES = {
    "dense": (Case(), 2, 1),
    "ring": (Case(), 2, 2),
    "ring alone": (Case(heads_per_stage=3), 1, 2),
    "several blocks": (Case(12, 12), 2, 2),
    "copied KV heads": (Case(16, 2), 4, 1),
    "norms and biases": (Case(config=dict(qk_layernorm=True, add_qkv_bias=True)), 2, 1),
    "output gate": (Case(config=dict(attention_output_gate=True)), 2, 1),
    "window": (Case(config=dict(window_size=(5, 0))), 2, 2),
    "sinks": (Case(config=dict(softmax_type="learnable")), 2, 2),
}


@pytest.mark.parametrize("overlap", [False, True])
def test_order_of_a_pass(overlap):
    """Everything of a kind in the order of the stages; with overlap one stage is ahead and one result on its way."""
    seen = []

    def bring(stage):
        seen.append(f"bring {stage}")
        return lambda: seen.append(f"wait {stage}") or stage

    def attend(stage, arrived):
        assert arrived == stage
        seen.append(f"attend {stage}")
        return lambda: seen.append(f"finish {stage}")

    run_stages([0, 1, 2], bring, attend, overlap)
    for kind in ("bring", "wait", "attend", "finish"):
        assert [line for line in seen if line.startswith(kind)] == [f"{kind} {i}" for i in range(3)]
    if overlap:
        assert seen.index("bring 2") < seen.index("attend 1") < seen.index("finish 0") < seen.index("finish 1")
    else:
        assert seen.index("finish 0") < seen.index("bring 1")


class Late:
    """Makes what a rank computes and what travels late, at random and differently on each rank."""

    def __init__(self, patch, rank):
        self._random = random.Random(rank)
        original = transport.TorchTransport.start

        def start(this, send):
            self.wait()
            return _LateSending(original(this, send), self.wait)

        def fetch(this, *args, original=ring._Ring.fetch):
            self.wait()
            return original(this, *args)

        patch.setattr(transport.TorchTransport, "start", start)
        patch.setattr(ring._Ring, "fetch", fetch)

    def wait(self):
        time.sleep(self._random.choice((0, 0, 0.002, 0.01)))


class _LateSending:
    def __init__(self, sending, wait):
        self._sending, self._wait = sending, wait

    def wait(self):
        self._wait()
        return self._sending.wait()


class LateKernel:
    def __init__(self, kernel, wait):
        self._kernel, self._wait = kernel, wait

    def __getattr__(self, name):
        return getattr(self._kernel, name)

    def forward(self, *args):
        self._wait()
        return self._kernel.forward(*args)

    def backward(self, *args):
        self._wait()
        return self._kernel.backward(*args)


def _pass(module, x, table):
    x = x.clone().requires_grad_()
    y, _ = module(x, None, rotary_pos_emb=table)
    torch.manual_seed(parallel_state.get_context_parallel_rank())
    y.backward(torch.randn_like(y))
    found = [y.detach(), x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad(set_to_none=True)
    return found


def _build(name, rank, dtype):
    case, p, r = CASES[name]
    initialize(p, r)
    module = upipe_attention(case, p, r, stock_attention(case, single_rank_groups())).to(dtype)
    layout = SequenceLayout(p, r)
    length = 2 * layout.size * case.chunk
    torch.manual_seed(rank)
    x = torch.randn(length // layout.size, case.micro_batch, case.hidden, dtype=dtype)
    table = local(rotary_table(case, length), layout, parallel_state.get_context_parallel_rank())
    return module, x, table


def _on_and_off(rank, name, dtype):
    module, x, table = _build(name, rank, dtype)
    wanted = _pass(module, x, table)
    plan = module.plan
    assert plan.overlap is False
    with pytest.MonkeyPatch.context() as patch:
        late = Late(patch, rank)
        module.use_kernel(LateKernel(plan.kernel, late.wait))
        for overlap in (True, False, True):
            module.plan = replace(module.plan, overlap=overlap)
            found = _pass(module, x, table)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    return len(plan.schedule.stages)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=pytest.mark.slow), torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_overlap_gives_the_same_bits_whatever_comes_late(workers, name, dtype):
    _, p, r = CASES[name]
    assert min(workers.run(p * r, _on_and_off, name, dtype)) > 1


class Broken:
    """A kernel that fails, or hangs, in its third stage on rank 1."""

    def __init__(self, kernel, rank, what):
        self._kernel, self._left, self._what = kernel, 2 if rank == 1 else 1000, what

    def __getattr__(self, name):
        return getattr(self._kernel, name)

    def forward(self, *args):
        self._left -= 1
        if self._left < 0:
            self._what()
        return self._kernel.forward(*args)


def _fail():
    raise ValueError("this rank fails")


def _hang():
    time.sleep(TIMEOUT_S + 4)
    raise ValueError("this rank fails")


TIMEOUT_S = 3


def _fails_mid_stage(rank, what):
    """Seconds until each rank ended, and by which error."""
    module, x, table = _build("dense", rank, torch.float64)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=TIMEOUT_S))
    groups = replace(module.groups, ulysses=group)
    module.use_kernel(Broken(module.plan.kernel, rank, what))
    module.plan = replace(module.plan, overlap=True, groups=groups)
    start = time.monotonic()
    try:
        module(x, None, rotary_pos_emb=table)
    except (ValueError, RuntimeError) as error:
        return time.monotonic() - start, str(error)
    return None


@pytest.mark.parametrize("what", [_fail, _hang])
def test_a_rank_that_fails_mid_stage_ends_all(workers, what):
    (waited, error), (_, own) = workers.run(2, _fails_mid_stage, what)
    assert "this rank fails" in own and "this rank fails" not in error
    assert waited < TIMEOUT_S + 3


def test_an_exchange_is_waited_for_once(workers):
    assert workers.run(2, _twice) == [True, True]


def _twice(rank):
    sending = transport.TorchTransport(torch.distributed.group.WORLD).start(torch.ones(2, 3))
    sending.wait()
    with pytest.raises(RuntimeError, match="twice"):
        sending.wait()
    return True
