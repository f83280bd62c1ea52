"""Packed documents: stock attention of each by itself, in fp64, for both of Megatron's layouts."""

import math
import random

import pytest
import torch
from attention.test_parity import check
from end_to_end.training import some_slow

from megatron_upipe.config import RotarySettings
from megatron_upipe.errors import UPipeError
from megatron_upipe.integration.selftest.packed import (
    Packing,
    compare_packed,
    compare_packed_low_precision,
    draw_packing,
)
from megatron_upipe.integration.selftest.parity import (
    TOLERANCE,
    Case,
    initialize,
    rotary_table,
    single_rank_groups,
    stock_attention,
    upipe_attention,
)

GROUPS = [(1, 1, 2), (1, 2, 1), (1, 2, 2), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (2, 2, 2), (1, 2, 4), (1, 4, 2)]
GROUPS.append(pytest.param(1, 4, 4, marks=pytest.mark.slow))
LAYOUTS = ("document", "sequence")


def _compare_all(rank, p, r, all_cases, tp=1, sp=False, padding=100.0):
    initialize(p, r, tp)
    groups = single_rank_groups()
    return [compare_packed(case, packing, p, r, groups, tp, sp, padding) for case, packing in all_cases]


def packings(seed, unit, count, layouts=LAYOUTS, most=3):
    rng = random.Random(seed)
    return [draw_packing(rng, unit, layouts[i % len(layouts)], unit * rng.randint(1, most)) for i in range(count)]


def case_for(packing, **changes):
    upipe = {"packed_layout": packing.layout, **changes.pop("upipe", {})}
    return Case(**{"micro_batch": 1, "upipe": upipe, **changes})


HEADS = [dict(), dict(heads=8, kv_heads=1), dict(heads=12, kv_heads=4, heads_per_stage=12)]


@pytest.mark.parametrize(("tp", "p", "r"), GROUPS)
def test_equals_stock_document_by_document(workers, tp, p, r):
    """Lengths from 1 to the whole sequence, odd ones, empty documents, an empty tail."""
    sp = tp > 1
    heads = HEADS if tp == 1 else [dict(heads=12, kv_heads=4), dict(heads=8, kv_heads=2)]
    all_cases = [
        (case_for(packing, **heads[i % len(heads)]), packing)
        for i, packing in enumerate(packings(100 * p + 10 * r + tp, 2 * p * r * (tp if sp else 1), 16))
    ]
    check(workers.run(tp * p * r, _compare_all, p, r, all_cases, tp, sp), [case for case, _ in all_cases])


def test_whole_sequence_and_documents_of_one_token(workers):
    shapes = [((24,), (24,)), ((1,) * 24, (1,) * 24), ((1, 22, 1), (1, 22, 1)), ((5, 0, 3), (8, 4, 8))]
    all_cases = [(case_for(p), p) for real, padded in shapes for p in [Packing(real, padded, 24, "sequence")]]
    all_cases += [(case_for(p), p) for p in [Packing((1, 7, 3), (8, 8, 8), 24, "document")]]
    check(workers.run(4, _compare_all, 2, 2, all_cases), [case for case, _ in all_cases])


CONFIGURATIONS = {
    "q/k norm and biases": dict(config=dict(qk_layernorm=True, add_qkv_bias=True)),
    "partial interleaved rope": dict(config=dict(rotary_interleaved=True), rotary_percent=0.4),
    "non-causal": dict(mask="no_mask"),
    "reference kernel": dict(upipe=dict(attention_backend="reference")),
    "window": dict(config=dict(window_size=(3, 0))),
    "wide window": dict(config=dict(window_size=(9, 0))),
    "window of one": dict(config=dict(window_size=(0, 0))),
    "sinks": dict(config=dict(softmax_type="learnable")),
    "sinks and window": dict(config=dict(softmax_type="learnable", window_size=(5, 0), qk_layernorm=True)),
}
SLOW = ("wide window", "partial interleaved rope", "reference kernel", "window of one")


@pytest.mark.parametrize("name", some_slow(CONFIGURATIONS, *SLOW))
def test_configurations(workers, name):
    all_cases = [(case_for(p, **CONFIGURATIONS[name]), p) for p in packings(7, 8, 6, most=5)]
    check(workers.run(4, _compare_all, 2, 2, all_cases), [case for case, _ in all_cases])


def test_padding_may_be_nan(workers):
    """Outputs and dx of real tokens do not see it."""
    config = dict(softmax_type="learnable", window_size=(4, 0))
    all_cases = [(case_for(p, config=config if i % 2 else {}), p) for i, p in enumerate(packings(4, 8, 8))]
    assert sum(sum(packing.real) < packing.length for _, packing in all_cases) > 3
    for errors in workers.run(4, _compare_all, 2, 2, all_cases, 1, False, math.nan):
        assert all(set(e) == {"output", "dx"} and max(e.values()) <= TOLERANCE for e in errors), errors


def _one_rank(rank, packings):
    """Megatron's own attention with UPipe's exact angles."""
    initialize(1, 1)
    groups = single_rank_groups()
    return [
        compare_packed(case_for(p, upipe=dict(rope="exact", rotary=RotarySettings())), p, 1, 1, groups, padding=0.0)
        for p in packings
    ]


def test_exact_rope_on_one_rank(workers):
    """Also of documents of odd length, none of which needs a zigzag."""
    all_packings = [Packing(n, n, sum(n), layout) for n in ((1, 7, 4), (5,)) for layout in LAYOUTS[1:]]
    all_packings.append(Packing((7, 3), (8, 4), 12, "document"))
    (found,) = workers.run(1, _one_rank, all_packings)
    assert all(max(errors.values()) < 1e-5 for errors in found), found  # Megatron's angles are in fp32


def _short_table(rank):
    initialize(2, 1)
    packing = Packing((8, 4), (8, 4), 12, "document")
    case = case_for(packing)
    module = upipe_attention(case, 2, 1, stock_attention(case, single_rank_groups()))
    x = torch.randn(6, 1, case.hidden, dtype=torch.float64)
    with pytest.raises(UPipeError, match="max_seqlen_q 7 is less than the longest document, of 8 tokens"):
        module(x, None, rotary_pos_emb=rotary_table(case, 7), packed_seq_params=packing.parameters())
    module(x, None, rotary_pos_emb=rotary_table(case, 8), packed_seq_params=packing.parameters())
    return True


def test_a_rope_table_that_is_too_short_is_refused(workers):
    assert workers.run(2, _short_table) == [True, True]


def _repeated(rank, packing):
    initialize(2, 2)
    groups = single_rank_groups()
    case = case_for(packing, config=dict(softmax_type="learnable", window_size=(6, 0)))
    stock = stock_attention(case, groups)
    module = upipe_attention(case, 2, 2, stock)
    torch.manual_seed(rank)
    x = torch.randn(packing.length // 4, 1, case.hidden, dtype=torch.float64)
    table = rotary_table(case, packing.length)
    found = []
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        leaf = x.clone().requires_grad_()
        y, _ = module(leaf, None, rotary_pos_emb=table, packed_seq_params=packing.parameters())
        y.square().sum().backward()
        found.append([y.detach(), leaf.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)])
    return len(found[0]), all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    "packing", [Packing((9, 1, 20), (9, 3, 20), 40, "sequence"), Packing((9, 20), (16, 24), 40, "document")]
)
def test_repeats_bit_for_bit(workers, packing):
    assert workers.run(4, _repeated, packing) == [(5, True)] * 4


def _refused(rank):
    initialize(2, 1)
    packing = Packing((5, 7), (5, 7), 12, "sequence")
    module = upipe_attention(Case(), 2, 1, stock_attention(Case(), single_rank_groups()))
    x = torch.randn(6, 3, Case.hidden, dtype=torch.float64)
    table = rotary_table(Case(), 12)
    messages = []
    for tokens in (x, x[:, :1]):
        with pytest.raises(UPipeError) as refused:
            module(tokens, None, rotary_pos_emb=table, packed_seq_params=packing.parameters())
        messages.append(str(refused.value))
    return messages


def test_refuses_micro_batches_and_lengths_of_the_other_layout(workers):
    samples, lengths = workers.run(2, _refused)[0]
    assert "packed documents come as one sequence, not as a micro-batch of 3; put the samples one after" in samples
    assert "a packed document of 5 tokens is no multiple of 4" in lengths


def _leaking(rank, all_cases):
    from megatron_upipe.context import pieces

    with pytest.MonkeyPatch.context() as patch:
        original = pieces.RingMask.pieces

        def leaking(self, rank, source):
            """The second document sees one key of the first."""
            for piece in original(self, rank, source):
                if piece.queries.start == 0 or piece.causal or piece.keys.start == 0:
                    yield piece
                else:
                    yield piece._replace(keys=pieces.Rows(piece.keys.start - 1, piece.keys.stop))

        patch.setattr(pieces.RingMask, "pieces", leaking)
        return _compare_all(rank, 1, 2, all_cases)


def _low_precision(rank, p, r, all_cases):
    initialize(p, r)
    groups = single_rank_groups()
    return [compare_packed_low_precision(case, packing, p, r, groups) for case, packing in all_cases]


@pytest.mark.parametrize(("p", "r"), [(2, 2), (1, 4)])
def test_bf16_errs_at_most_twice_as_stock_does(workers, p, r):
    """Output and dx, summed over the ranks; with sinks the output is rounded once more."""
    packing = Packing((90, 7, 150), (96, 8, 152), 256, "document")
    configs = [{}, dict(softmax_type="learnable"), dict(softmax_type="learnable", window_size=(20, 0))]
    all_cases = [(case_for(packing, config=config, heads_per_stage=p), packing) for config in configs]
    found = workers.run(4, _low_precision, p, r, all_cases)
    for number in range(len(configs)):
        for name in ("output", "dx"):
            ours, stock = (sum(errors[number][name][i] ** 2 for errors in found) for i in range(2))
            assert 0 < ours <= 2**2 * stock, (configs[number], name, ours, stock)


def test_a_planted_leak_is_caught(workers):
    packing = Packing((8, 16), (8, 16), 24, "document")
    all_cases = [(case_for(packing), packing)]
    check(workers.run(2, _compare_all, 1, 2, all_cases), [case for case, _ in all_cases])
    found = workers.run(2, _leaking, all_cases)
    assert max(error["output"] for (error,) in found) > 1e-3
