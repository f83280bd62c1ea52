"""Flags about FP8: each refusal names the flag, the value and what to do, and has its twin."""

import pytest
from integration.test_memory_flags import SPEC, installed, parse  # noqa: F401
from megatron_version import since_019

from megatron_upipe.errors import UPipeError
from megatron_upipe.integration import flags
from megatron_upipe.integration.upipe_spec import upipe_config

MODEL = ["--num-layers", "4", "--num-attention-heads", "4", "--hidden-size", "64", "--seq-length", "64"]
MODEL += ["--ffn-hidden-size", "96", "--kv-channels", "16", "--micro-batch-size", "3"]
MODEL += ["--position-embedding-type", "rope", "--attention-dropout", "0", "--hidden-dropout", "0"]
CP2 = [*MODEL, *SPEC, "--context-parallel-size", "2"]
BLOCKS = ["--hidden-size", "256", "--kv-channels", "64", "--ffn-hidden-size", "384"]
BLOCKS += ["--seq-length", "256", "--micro-batch-size", "1"]
FP8 = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"]


ATTENTION = ["--upipe-fp8-attention", "forward", "--seq-length", "128"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            [*CP2, "--fp8-format", "hybrid"],
            r"delayed \(Megatron's default\) .*; use tensorwise or blockwise",
        ),
        ([*CP2, *FP8, "--fp8-param-gather"], "--fp8-param-gather is not .*; leave it out"),
        ([*CP2, *FP8, "--hidden-size", "72"], "multiples of 16, but --hidden-size is 72; the nearest is 64"),
        ([*CP2, *FP8, "--kv-channels", "4"], "a stage's queries .* is 8"),
        ([*CP2, *FP8, "--ffn-hidden-size", "100"], "--ffn-hidden-size / --tensor-model-parallel-size is 100"),
        ([*CP2, *FP8, "--seq-length", "56"], "the tokens of a rank .* is 84; the nearest is 80"),
        ([*CP2, *FP8, "--fp8-recipe", "mxfp8", "--hidden-size", "80"], "multiples of 32, but --hidden-size is 80"),
        ([*CP2, "--upipe-fp8-attention", "forward"], "--upipe-fp8-attention forward is for layers in FP8; add --fp8-"),
        ([*MODEL, *SPEC, "--upipe-fp8-attention", "forward"], "does nothing with --context-parallel-size 1"),
        ([*MODEL, "--upipe-fp8-attention", "forward"], "does nothing without the spec"),
        ([*MODEL, *FP8], "--fp8-format hybrid needs TransformerEngine and a GPU"),
        ([*MODEL, *SPEC, *FP8], "--fp8-format hybrid needs TransformerEngine and a GPU .* above 1"),
        (
            [*CP2, *FP8, "--num-experts", "2"],
            "--fp8-format hybrid needs TransformerEngine .* without experts",
        ),
        ([*CP2, *FP8, "--upipe-fp8-attention", "forward"], "multiples of 128 tokens .* not 64; the nearest is 128"),
        ([*CP2, *FP8, *ATTENTION, "--window-size", "(8, 0)"], "forward does not work with --window-size; use --upipe-"),
        ([*CP2, *FP8, *ATTENTION, "--sft"], "forward does not work with --sft; use --upipe-fp8-attention off"),
        pytest.param(
            [*CP2, *FP8, *ATTENTION, "--dataloader-inter-document-masking"],
            "forward does not work with --dataloader-",
            marks=since_019,
        ),
        ([*CP2, "--sft", "--pipeline-model-parallel-size", "2"], "--micro-batch-size 3 with --sft is one sequence in"),
        (
            [*CP2, *FP8, "--upipe-fp8-attention", "full", "--seq-length", "256"],
            "query heads of a stage, not 1 x 16; raise --upipe-heads-per-stage 2, or use off",
        ),
    ],
)
def test_refused(argv, message):
    with pytest.raises(UPipeError, match=message):
        flags.check_flags(parse(*argv))


@pytest.mark.parametrize(
    ("argv", "mode"),
    [
        ([], "off"),
        (FP8, "off"),
        ([*FP8, "--fp8-format", "e4m3", "--upipe-fp8-attention", "off"], "off"),
        ([*FP8, "--upipe-fp8-attention", "forward", "--seq-length", "128"], "forward"),
        (
            [
                *(*FP8, "--fp8-recipe", "mxfp8", "--upipe-fp8-attention", "full", "--seq-length", "128"),
                *("--kv-channels", "64", "--upipe-heads-per-stage", "4"),
            ],
            "full",
        ),
        ([*FP8, "--fp8-recipe", "blockwise", *BLOCKS], "off"),
        ([*FP8, "--window-size", "(8, 0)", "--sft"], "off"),
        (["--sft", "--pipeline-model-parallel-size", "2", "--micro-batch-size", "1"], "off"),
    ],
)
def test_accepted(argv, mode):
    args = parse(*CP2, *argv)
    flags.check_flags(args)
    assert upipe_config(args).fp8_attention == mode
