"""Packed documents in the simulator: lengths, FLOPs, what a user may ask for."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning.test_simulate import scenario

from megatron_upipe import cli
from megatron_upipe.context.layout import SequenceLayout
from megatron_upipe.errors import UPipeError
from megatron_upipe.planning.documents import fill, most_pairs, pairs_of_rank, segments_of, shrink
from megatron_upipe.planning.report import report
from megatron_upipe.planning.training_flags import simulate_flags, training_flags

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(LENGTHS, st.integers(1, 500))
def test_documents_fill_the_sequence(pattern, tokens):
    lengths = fill(pattern, tokens)
    assert sum(lengths) == tokens and min(lengths) > 0
    assert lengths[:-1] == [pattern[i % len(pattern)] for i in range(len(lengths) - 1)]
    assert lengths[-1] <= pattern[(len(lengths) - 1) % len(pattern)]


@given(LENGTHS, st.integers(1, 8), st.integers(1, 30))
def test_fewer_tokens_keep_the_shares(lengths, unit, units):
    lengths = [length * unit for length in lengths]
    short = shrink(lengths, units * unit, unit)
    assert sum(short) == units * unit and all(n % unit == 0 and n > 0 for n in short)
    assert len(short) <= len(lengths)
    assert shrink(lengths, sum(lengths), unit) == lengths


def test_attention_costs_what_its_documents_do():
    """On one ring rank the sum of squares; FLOPs of the report, too."""
    whole, packed = (report(scenario(tokens=4096, documents=lengths)) for lengths in (None, (1024, 512, 512)))
    share = 2 * (1024**2 + 2 * 512**2) / 4096**2
    assert packed.work.attention_flops == pytest.approx(share * whole.work.attention_flops)
    assert packed.work.gemm_flops == whole.work.gemm_flops
    assert packed.host == whole.host
    # the exchange takes the same tensors in an order of its own, and RoPE's angles are taken from the table by position
    local, whole_length, number, angle = 1024, 4096, 8, 4 * 16
    more = (whole_length + local) * number + local * angle
    assert packed.device_peak - whole.device_peak == pytest.approx(more, abs=100)


@pytest.mark.slow
def test_of_uneven_ranks_the_busiest_counts():
    """One document in the last half of the sequence: under one zigzag the ring rank of the middle has most of it."""
    layout = SequenceLayout(1, 2)
    segments = segments_of([8] * 4 + [32], layout, 64, per_document=False)
    pairs = [pairs_of_rank(segments, rank) for rank in range(2)]
    assert sum(pairs) == 4 * 32 + 512 and pairs[0] != pairs[1] and most_pairs(segments) == max(pairs)
    even = segments_of([32, 32], layout, 64, per_document=True)
    assert pairs_of_rank(even, 0) == pairs_of_rank(even, 1) == 512
    run = scenario(gpus=2, tokens=64, ring=2, ulysses=1, documents=(8, 8, 8, 8, 32), packed_layout="sequence")
    step = report(run).step
    dense = report(replace(run, documents=None)).step
    assert step.attention_forward_flops / dense.attention_forward_flops == pytest.approx(max(pairs) / (64 * 64 / 4))


def test_steps_that_no_rank_needs_are_not_sent():
    short = dict(ring=4, ulysses=1, method="usp", tokens=4096, documents=(512,), packed_layout="sequence")
    assert "ring" not in report(scenario(**short)).work.sent
    assert report(scenario(**{**short, "documents": (1024,)})).work.sent["ring"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(documents=(100,)), r"--documents 100 is no multiple of 8 .*; the nearest is 96, or use --packed-layout"),
        (dict(documents=(512,), method="authors"), "--method authors takes no packed documents; leave --documents out"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(UPipeError, match=message):
        scenario(**changes).check()


def test_accepted():
    scenario(documents=(96, 8)).check()
    scenario(documents=(100,), packed_layout="sequence").check()


def test_flags():
    for layout, flag in (("document", "--sft"), ("sequence", "--dataloader-inter-document-masking")):
        run = scenario(documents=(512, 64), packed_layout=layout)
        assert flag in training_flags(run)
        assert "--documents 512 64 --packed-layout " + layout in " ".join(simulate_flags(run, "small"))
    assert "--sft" not in training_flags(scenario())


@pytest.mark.slow
def test_command(capsys):
    base = ["simulate", "--model", "llama3-8b", "--gpus", "8", "--tokens", "1M", "--host-memory", "2000"]
    sizes = []
    for documents in ([], ["--documents", "128K", "64K", "64K"]):
        assert cli.main([*base, *documents, "--json"]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["methods"]["upipe"])
    assert sizes[1]["attention_tflops"] == pytest.approx(sizes[0]["attention_tflops"] * 3 / 32, rel=1e-3)
    assert any("packed documents" in line for line in sizes[1]["assumptions"])
    assert cli.main([*base, "--documents", "128K"]) == 0
    assert "8 documents of up to 128K (simulated)" in capsys.readouterr().out
    assert cli.main([*base, "--documents", "many"]) == 2
    assert "--documents many is not a number of tokens" in capsys.readouterr().err
    assert cli.main([*base, "--documents", "0.4"]) == 2
    assert "--documents 0.4 is too small; the least is 1" in capsys.readouterr().err
    assert cli.main([*base, "--packed-layout", "sequence"]) == 2
    assert "--packed-layout sequence does nothing without --documents; add that" in capsys.readouterr().err
