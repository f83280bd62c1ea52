"""Flags of hybrid models and experts: a spec of the wrong kind, and what a stack of mixed layers cannot do."""

import pytest
from integration.test_memory_flags import SPEC, installed, parse  # noqa: F401

from megatron_upipe.errors import UPipeError
from megatron_upipe.integration import flags

SIZES = ["--num-attention-heads", "4", "--hidden-size", "64", "--seq-length", "64", "--position-embedding-type", "rope"]
SIZES += ["--attention-dropout", "0", "--hidden-dropout", "0", "--context-parallel-size", "2"]
HYBRID = ["--spec", "megatron_upipe.layer_specs", "upipe_hybrid_stack_spec"]
PATTERN = ["--hybrid-layer-pattern", "*-*-"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            [*SIZES, *HYBRID, "--num-layers", "4"],
            "upipe_hybrid_stack_spec needs --hybrid-layer-pattern; add that, or",
        ),
        (
            [*SIZES, *SPEC, *PATTERN],
            r"--hybrid-layer-pattern \*-\*- needs the spec of a hybrid stack, not --spec",
        ),
        ([*SIZES, *HYBRID, *PATTERN[:1], "*-/*-"], r"has multi-token prediction, .*; the nearest is \*-$"),
        ([*SIZES, *HYBRID, "--hybrid-layer-pattern=--"], r"has no attention layer \(\*\); leave --spec out"),
        ([*SIZES, *HYBRID, *PATTERN[:1], "*M-"], r"layers M need a GPU; on a CPU there are \* \(attention\)"),
        ([*SIZES, *HYBRID, *PATTERN, "--upipe-keep-attention", "3"], "more than the 2 attention layers; the most is 2"),
        (
            [*SIZES, *HYBRID, *PATTERN, "--upipe-checkpoint-every", "2"],
            "--upipe-checkpoint-every 2 runs UPipe layers again one after the other, .*; use 1",
        ),
        (
            [*SIZES, *HYBRID, *PATTERN, "--upipe-keep-attention", "1", "--pipeline-model-parallel-size", "2"],
            "--upipe-keep-attention 1 cannot be spread over the pipeline stages of a hybrid model; use all",
        ),
    ],
)
def test_refused(argv, message):
    with pytest.raises(UPipeError, match=message):
        flags.check_flags(parse(*argv))


@pytest.mark.parametrize(
    "argv",
    [
        [*SIZES, *HYBRID, *PATTERN],
        [*SIZES, *HYBRID, *PATTERN, "--upipe-keep-attention", "2", "--upipe-offload", "host"],
        [*SIZES, *HYBRID, *PATTERN, "--upipe-keep-attention", "all", "--pipeline-model-parallel-size", "2"],
        [*SIZES, *SPEC, "--num-layers", "4", "--num-experts", "2", "--moe-layer-freq", "([1,0]*2)"],
    ],
)
def test_taken(argv):
    flags.check_flags(parse(*argv))
