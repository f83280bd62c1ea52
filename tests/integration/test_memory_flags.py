"""Flags about what waits for backward: each refusal names the flag, the value and what to do, and has its twin."""

import argparse

import pytest
import torch

from megatron_upipe.config import UPipeConfig
from megatron_upipe.errors import UPipeError
from megatron_upipe.integration import cpu, flags, host_memory, launcher
from megatron_upipe.integration.selftest.parity import Case, initialize, make_config
from megatron_upipe.integration.symbols import registry
from megatron_upipe.integration.upipe_spec import check_layers, upipe_config

MODEL = ["--num-layers", "4", "--num-attention-heads", "4", "--hidden-size", "32", "--seq-length", "64"]
MODEL += ["--position-embedding-type", "rope", "--attention-dropout", "0", "--hidden-dropout", "0"]
SPEC = ["--spec", "megatron_upipe.layer_specs", "upipe_layer_spec"]
CP2 = [*MODEL, *SPEC, "--context-parallel-size", "2"]


@pytest.fixture(autouse=True)
def installed():
    launcher.install(force_cpu=True)
    yield
    registry.undo(launcher.OWNER)
    registry.undo(cpu.stand_in.OWNER)


def parse(*argv):
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*MODEL, "--upipe-offload", "host"], "--upipe-offload does nothing without the spec"),
        ([*MODEL, *SPEC, "--upipe-offload", "host"], "--upipe-offload does nothing with --context-parallel-size 1"),
        ([*MODEL, *SPEC, "--upipe-mlp-tile-tokens", "8"], "--upipe-mlp-tile-tokens does nothing with --context"),
        ([*CP2, "--upipe-attention-backend", "torch-flash"], "torch-flash does not serve .*: needs CUDA tensors"),
        ([*CP2, "--upipe-attention-backend", "flash-attn-2"], "flash-attn-2 does not serve .* pip install"),
        ([*CP2, "--upipe-attention-backend", "fast"], "--upipe-attention-backend: invalid choice: 'fast' .choose from"),
        ([*CP2, "--upipe-keep-attention", "5"], r"--upipe-keep-attention 5 is more than the 4 layers; .* 4 \(or all\)"),
        (
            [*CP2, "--upipe-keep-attention", "most"],
            r"--upipe-keep-attention most is not a number of layers; use 0 to 4 \(or all\)",
        ),
        ([*CP2, "--upipe-keep-attention", "-1"], "--upipe-keep-attention -1 is not a number of layers"),
        ([*CP2, "--upipe-checkpoint-every", "5"], "--upipe-checkpoint-every 5 is more than the 4 layers; .* is 4"),
        ([*CP2, "--upipe-checkpoint-every", "0"], "--upipe-checkpoint-every 0 is too small; the least is 1"),
        (
            [*CP2, "--upipe-mlp-tile-tokens", "abc"],
            "--upipe-mlp-tile-tokens: abc is not a whole number; the least is 1",
        ),
        ([*CP2, "--upipe-prefetch", "on"], "--upipe-prefetch on does nothing without --upipe-offload host"),
        ([*CP2, "--upipe-mlp-tile-tokens", "0"], "--upipe-mlp-tile-tokens 0 is too small; the least is 1"),
        ([*CP2, "--upipe-loss-tile-tokens", "-1"], "--upipe-loss-tile-tokens -1 is too small; the least is 0"),
        (
            [*CP2, "--cross-entropy-loss-fusion", "--upipe-loss-tile-tokens", "8"],
            "--cross-entropy-loss-fusion does nothing with --upipe-loss-tile-tokens 8",
        ),
        (
            [*CP2, "--defer-embedding-wgrad-compute", "--upipe-loss-tile-tokens", "8"],
            "--defer-embedding-wgrad-compute does not work with the tiled loss",
        ),
        ([*CP2, "--recompute-granularity", "full"], "--recompute-granularity full .* use --upipe-keep-attention 0"),
        ([*CP2, "--recompute-activations"], "--recompute-modules core_attn"),
        ([*CP2, "--mlp-chunks-for-training", "2"], "--mlp-chunks-for-training 2 .* use --upipe-mlp-tile-tokens"),
    ],
)
def test_refused(argv, message):
    with pytest.raises(UPipeError, match=message):
        flags.check_flags(parse(*argv))


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        ([], UPipeConfig()),
        (["--upipe-keep-attention", "all"], UPipeConfig()),
        (["--upipe-attention-backend", "reference"], dict(attention_backend="reference")),
        (["--upipe-keep-attention", "4", "--upipe-checkpoint-every", "4"], dict(keep_attention=4, checkpoint_every=4)),
        (["--upipe-keep-attention", "0"], dict(keep_attention=0)),
        (["--upipe-checkpoint-every", "2", "--use-megatron-fsdp"], dict(checkpoint_every=2)),
        (["--upipe-offload", "host", "--upipe-prefetch", "on"], dict(offload="host", prefetch="on")),
        (
            ["--upipe-mlp-tile-tokens", "1", "--upipe-loss-tile-tokens", "7"],
            dict(mlp_tile_tokens=1, loss_tile_tokens=7),
        ),
        (["--upipe-overlap", "on", "--upipe-exchange", "auto"], dict(overlap="on", exchange="auto")),
        (["--upipe-overlap", "auto", "--upipe-exchange", "nccl"], UPipeConfig()),
        (["--upipe-loss-tile-tokens", "0", "--cross-entropy-loss-fusion"], dict(loss_tile_tokens=0)),
        (["--cross-entropy-loss-fusion"], dict(loss_tile_tokens=0)),
        (["--defer-embedding-wgrad-compute"], dict(loss_tile_tokens=0)),
    ],
)
def test_accepted(argv, wanted):
    args = parse(*CP2, *argv)
    flags.check_flags(args)
    found, wanted = upipe_config(args), wanted if isinstance(wanted, UPipeConfig) else UPipeConfig(**wanted)
    for name in (
        "attention_backend",
        "overlap",
        "exchange",
        "keep_attention",
        "offload",
        "prefetch",
        "checkpoint_every",
        "mlp_tile_tokens",
        "loss_tile_tokens",
    ):
        assert getattr(found, name) == getattr(wanted, name)


def test_one_context_parallel_rank_has_the_tiled_loss_if_asked():
    args = parse(*MODEL, *SPEC)
    flags.check_flags(args)
    assert upipe_config(args).loss_tile_tokens == 0, "stock unless asked for"
    args = parse(*MODEL, *SPEC, "--upipe-loss-tile-tokens", "8")
    flags.check_flags(args)
    assert upipe_config(args).loss_tile_tokens == 8


def _too_small(rank, available):
    """The error of a host that lacks memory, the same on all ranks; None if it fits."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module

    from megatron_upipe.layer_specs import upipe_layer_spec

    initialize(2, 1)
    case = Case(upipe=dict(offload="host", keep_attention=1), micro_batch=2)
    config = make_config(case, 2, 1, num_layers=2)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layers = [
        build_module(upipe_layer_spec, config=config, layer_number=i, pg_collection=groups).double() for i in (1, 2)
    ]
    args = argparse.Namespace(
        seq_length=32,
        context_parallel_size=2,
        micro_batch_size=2,
        global_batch_size=8,
        data_parallel_size=1,
        hidden_size=case.hidden,
        params_dtype=torch.float64,
        microbatch_group_size_per_vp_stage=None,
        pipeline_model_parallel_size=1,
        upipe_keep_attention="1",
        upipe_offload="host",
        upipe_prefetch=None,
        upipe_checkpoint_every=None,
        upipe_mlp_tile_tokens=None,
        upipe_loss_tile_tokens=None,
    )
    model = [torch.nn.ModuleList(layers)]
    check_layers(args, model)
    needed = host_memory.host_store_bytes(args, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "available_bytes", lambda: available if rank == 0 else 10**12)
        try:
            host_memory.check_host_memory(args, model)
        except UPipeError as error:
            return needed, str(error)
    return needed, None


def test_host_memory_is_checked_on_all_ranks_before_the_first_step(workers):
    fits = workers.run(2, _too_small, 10**12)
    needed = fits[0][0]
    tokens, heads, head_dim, hidden = 16 * 2, 12, 10, 28
    attention = tokens * heads * (head_dim + 1) * 8
    # the first layer's attention is made again when the second one's, which was kept, is gone
    assert needed == 2 * tokens * hidden * 8 + attention
    assert [error for _, error in fits] == [None, None]
    errors = {error for _, error in workers.run(2, _too_small, 2 * needed - 1)}
    assert len(errors) == 1
    message = errors.pop()
    assert f"needs {2 * needed:,} bytes of host memory for 2 ranks" in message
    assert f"has {2 * needed - 1:,} bytes available" in message
