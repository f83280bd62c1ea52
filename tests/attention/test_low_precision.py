"""bf16: errors against fp64 are at most twice those of the stock attention in bf16."""

import pytest
import torch
import torch.distributed as dist
from attention.modules import (
    Case,
    initialize,
    local,
    rotary_table,
    single_rank_groups,
    stock_attention,
    upipe_attention,
)
from megatron.core import parallel_state

from megatron_upipe.context.layout import SequenceLayout


def _errors(rank, p, r, case):
    """Errors of UPipe and of stock, both in bf16, against stock in fp64."""
    initialize(p, r)
    groups = single_rank_groups()
    layout, rank = SequenceLayout(p, r), parallel_state.get_context_parallel_rank()
    length = 2 * layout.size * case.chunk
    table = rotary_table(case, length)
    torch.manual_seed(2)
    x, dy = (torch.randn(length, case.micro_batch, case.hidden).bfloat16() for _ in range(2))
    exact = stock_attention(case, groups)
    with torch.no_grad():  # weights that bf16 holds exactly
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
    plain, upipe = stock_attention(case, groups), upipe_attention(case, p, r, exact)
    plain.load_state_dict(exact.state_dict())
    found = []
    runs = ((exact, torch.float64, True), (plain, torch.bfloat16, True), (upipe, torch.bfloat16, False))
    for module, dtype, whole in runs:
        module.to(dtype)
        pick = (lambda t: t) if whole else (lambda t: local(t, layout, rank))
        leaf = pick(x).to(dtype, copy=True).requires_grad_()
        y = module(leaf, None, rotary_pos_emb=pick(table))[0]
        y.backward(pick(dy).to(dtype))
        mine = (lambda t: local(t, layout, rank)) if whole else (lambda t: t)
        gradients = {"output": mine(y.detach()).double(), "dx": mine(leaf.grad).double()}
        for name, parameter in module.named_parameters():
            gradient = parameter.grad.double()
            if not whole:
                dist.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
            gradients[name] = gradient
        found.append(gradients)
    wanted, stock, ours = found
    return {n: ((ours[n] - w).norm() / w.norm(), (stock[n] - w).norm() / w.norm()) for n, w in wanted.items()}


@pytest.mark.parametrize("heads_per_stage", [2, 6, 12])
@pytest.mark.parametrize(("p", "r"), [(2, 1), (2, 2)])
def test_bf16_error_is_at_most_twice_stock(workers, p, r, heads_per_stage):
    case = Case(heads_per_stage=heads_per_stage, chunk=16, head_dim=16, hidden=64)
    for errors in workers.run(p * r, _errors, p, r, case):
        assert set(errors) == {"output", "dx", "linear_qkv.weight", "linear_proj.weight"}
        for name, (ours, stock) in errors.items():
            assert 0 < ours <= 2 * stock, (name, ours, stock)


def test_many_stages(workers):
    """16 stages: dx is summed in fp32."""
    case = Case(heads=32, kv_heads=4, heads_per_stage=2, chunk=8, head_dim=8, hidden=64)
    for errors in workers.run(2, _errors, 2, 1, case):
        for name, (ours, stock) in errors.items():
            assert ours <= 2 * stock, (name, ours, stock)
