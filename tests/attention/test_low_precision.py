"""bf16: errors against fp64 are at most twice those of the stock attention in bf16."""

import pytest

from megatron_upipe.integration.selftest.parity import Case, compare_low_precision, initialize, single_rank_groups


def _errors(rank, p, r, case):
    initialize(p, r)
    return compare_low_precision(case, p, r, single_rank_groups())


@pytest.mark.parametrize("heads_per_stage", [2, 6, 12])
@pytest.mark.parametrize(("p", "r"), [(2, 1), (2, 2)])
def test_bf16_error_is_at_most_twice_stock(workers, p, r, heads_per_stage):
    case = Case(heads_per_stage=heads_per_stage, chunk=16, head_dim=16, hidden=64)
    for errors in workers.run(p * r, _errors, p, r, case):
        assert set(errors) == {"output", "dx", "linear_qkv.weight", "linear_proj.weight"}
        for name, (ours, stock) in errors.items():
            assert 0 < ours <= 2 * stock, (name, ours, stock)


@pytest.mark.parametrize(("p", "r"), [(2, 1), (1, 2), (2, 2)])
def test_norms(workers, p, r):
    """Sums over all tokens and heads that nearly cancel; enough tokens for the error to be no accident."""
    norms = dict(qk_layernorm=True, add_qkv_bias=True)
    case = Case(heads=16, kv_heads=4, heads_per_stage=p, chunk=64, head_dim=32, hidden=64, config=norms)
    for errors in workers.run(p * r, _errors, p, r, case):
        assert {"q_layernorm.weight", "k_layernorm.weight"} <= set(errors)
        for name, (ours, stock) in errors.items():
            assert 0 < ours <= 2 * stock, (name, ours, stock)


def test_many_stages(workers):
    """16 stages: dx is summed in fp32."""
    case = Case(heads=32, kv_heads=4, heads_per_stage=2, chunk=8, head_dim=8, hidden=64)
    for errors in workers.run(2, _errors, 2, 1, case):
        for name, (ours, stock) in errors.items():
            assert ours <= 2 * stock, (name, ours, stock)
