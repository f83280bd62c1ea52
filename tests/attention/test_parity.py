"""The headline: stock weights give the stock result, in fp64, for all legal heads per stage."""

import pytest
import torch

from megatron_upipe.attention.schedule import legal_heads_per_stage
from megatron_upipe.integration.selftest.parity import TOLERANCE, Case, compare, initialize, single_rank_groups

GROUPS = [(1, 2), (1, 4), (2, 1), (4, 1), (2, 2), (2, 3)]
HEADS = [(8, 8), (8, 4), (12, 4), (8, 2), (8, 1)]


def cases(p):
    for heads, kv_heads in HEADS:
        legal = legal_heads_per_stage(heads, kv_heads, p)
        for u in sorted({p, 2 * p, heads} & set(legal)):
            for micro_batch in (1, 3):
                yield Case(heads=heads, kv_heads=kv_heads, heads_per_stage=u, micro_batch=micro_batch)


def _compare_all(rank, p, r, all_cases, tp=1, sp=False, strided=False):
    initialize(p, r, tp)
    groups = single_rank_groups()
    return [compare(case, p, r, groups, tp, sp, strided) for case in all_cases]


def check(found, all_cases, tolerance=TOLERANCE):
    for rank, errors in enumerate(found):
        for case, error in zip(all_cases, errors, strict=True):
            assert {"output", "dx", "linear_qkv.weight", "linear_proj.weight"} <= set(error)
            assert max(error.values()) <= tolerance, (rank, case, error)


@pytest.mark.parametrize(("p", "r"), GROUPS)
def test_attention_equals_stock(workers, p, r):
    all_cases = list(cases(p))
    assert len(all_cases) >= 15
    check(workers.run(p * r, _compare_all, p, r, all_cases), all_cases)


def test_where_the_authors_reindex_is_no_permutation(workers):
    """(H, K, P) from facts on the authors' code: K != P and U != H/K."""
    all_cases = [Case(heads=32, kv_heads=8, heads_per_stage=2), Case(heads=48, kv_heads=8, heads_per_stage=4)]
    check(workers.run(2, _compare_all, 2, 1, all_cases), all_cases)
    all_cases = [Case(heads=48, kv_heads=8, heads_per_stage=4), Case(heads=16, kv_heads=8, heads_per_stage=8)]
    check(workers.run(4, _compare_all, 4, 1, all_cases), all_cases)


CONFIGURATIONS = {
    "biases": dict(add_bias_linear=True),
    "qkv bias": dict(add_qkv_bias=True),
    "q/k norm": dict(qk_layernorm=True),
    "q/k layer norm": dict(qk_layernorm=True, normalization="LayerNorm", add_qkv_bias=True),
    "interleaved rope": dict(rotary_interleaved=True),
    "softmax scale": dict(softmax_scale=0.7),
    "no rope": dict(no_rope_freq=[1]),
    "output gate": dict(attention_output_gate=True),
    "output gate and biases": dict(attention_output_gate=True, add_qkv_bias=True, qk_layernorm=True),
    "L2 norm": dict(qk_l2_norm=True),
    "window": dict(window_size=(4, 0)),
    "wide window": dict(window_size=(15, 0)),
    "window wider than the sequence": dict(window_size=(100, 0)),
    "no window in this layer": dict(window_size=(4, 0), window_attn_skip_freq=[0]),
    "sinks": dict(softmax_type="learnable"),
    "sinks of zero and window": dict(softmax_type="off-by-one", window_size=(7, 0), qk_layernorm=True),
}
# stock Megatron itself drops to fp32 in these, in both implementations
IN_FP32 = ("output gate", "output gate and biases", "L2 norm")


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configurations(workers, name):
    all_cases = [
        Case(config=CONFIGURATIONS[name], heads_per_stage=2),
        Case(config=CONFIGURATIONS[name], heads=8, kv_heads=1, heads_per_stage=4),
    ]
    check(workers.run(4, _compare_all, 2, 2, all_cases), all_cases, 1e-6 if name in IN_FP32 else TOLERANCE)


@pytest.mark.parametrize("heads_per_stage", [2, 6, 12])
def test_non_causal_and_partial_rope(workers, heads_per_stage):
    all_cases = [
        Case(mask="no_mask", heads_per_stage=heads_per_stage),
        Case(rotary_percent=0.6, heads_per_stage=heads_per_stage),
        Case(rotary_percent=0.4, config=dict(rotary_interleaved=True), heads_per_stage=heads_per_stage),
    ]
    check(workers.run(4, _compare_all, 2, 2, all_cases), all_cases)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize(("tp", "p", "r"), [(2, 2, 1), (2, 1, 2), (2, 2, 2)])
def test_tensor_parallel(workers, tp, p, r, sp):
    """Stages within a tensor-parallel rank's heads; with sequence parallelism x and y are sharded once more."""
    norms = dict(qk_layernorm=True, add_qkv_bias=True)
    all_cases = [Case(chunk=4), Case(chunk=4, heads=16, kv_heads=2, heads_per_stage=4), Case(chunk=4, config=norms)]
    check(workers.run(tp * p * r, _compare_all, p, r, all_cases, tp, sp), all_cases)


def test_world_larger_than_the_context_parallel_group(workers):
    """Data parallel 2: groups, not global ranks, decide who sends to whom."""
    all_cases = [Case(heads_per_stage=6), Case(heads=8, kv_heads=1)]
    check(workers.run(8, _compare_all, 2, 2, all_cases), all_cases)


def test_inputs_that_are_not_contiguous(workers):
    all_cases = [Case(), Case(heads_per_stage=6)]
    check(workers.run(4, _compare_all, 2, 2, all_cases, 1, False, True), all_cases)


def _compare_poisoned(rank, p, r, all_cases):
    """New memory is NaN: whatever is read before it is written shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        assert torch.empty(3).isnan().all()
        return _compare_all(rank, p, r, all_cases)
    finally:
        torch.use_deterministic_algorithms(False)


def test_poisoned_memory(workers):
    all_cases = [Case(heads_per_stage=2), Case(heads=8, kv_heads=1), Case(heads_per_stage=12)]
    check(workers.run(4, _compare_poisoned, 2, 2, all_cases), all_cases)
