"""What UPipe refuses, by flag, and what it takes: each refusal has its twin."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_upipe import checks
from megatron_upipe.checks import check_model, check_parallelism
from megatron_upipe.config import RotarySettings, UPipeConfig, keeps_attention
from megatron_upipe.errors import UPipeError

GOOD = dict(
    attention_dropout=0.0,
    hidden_dropout=0.0,
    fp32_residual_connection=False,
    multi_latent_attention=False,
    mtp_num_layers=None,
    window_size=None,
    softmax_type="vanilla",
    hybrid_context_parallel=False,
    recompute_granularity=None,
    recompute_modules=None,
    position_embedding_type="rope",
    sft=False,
    dataloader_inter_document_masking=False,
    reset_attention_mask=False,
    reset_position_ids=False,
)

BAD = [
    ("attention_dropout", 0.1, "--attention-dropout 0.1 is not supported by UPipe .*; set it to 0"),
    ("hidden_dropout", 0.1, "--hidden-dropout 0.1 .*; set it to 0"),
    ("fp32_residual_connection", True, "--fp32-residual-connection is not supported .*; leave it out"),
    ("multi_latent_attention", True, "--multi-latent-attention is not"),
    ("mtp_num_layers", 1, "--mtp-num-layers 1 is not"),
    ("window_size", (128, 128), r"--window-size 128 128 is not .*: the nearest is \(128, 0\)"),
    ("window_size", (13,), r"--window-size 13 is not .*; windows are causal, .* the nearest is \(13, 0\)"),
    ("window_size", (128, -1), "--window-size 128 -1 is not"),
    ("window_size", (-2, 0), "--window-size -2 0 is not"),
    ("hybrid_context_parallel", True, "--hybrid-context-parallel is not"),
    ("dynamic_context_parallel", True, "--dynamic-context-parallel is not"),
    ("cuda_graph_impl", "local", "--cuda-graph-impl local is not"),
    ("fp4", "e2m1", "--fp4-format e2m1 is not .*; use --fp8-format"),
    ("fp8_param_gather", True, "--fp8-param-gather is not .*; leave it out"),
    ("cp_comm_type", ["a2a"], "--cp-comm-type a2a is not .*; leave it out, UPipe has its own"),
    (
        "position_embedding_type",
        "learned_absolute",
        "--position-embedding-type learned_absolute .*; use rope, yarn or none",
    ),
    (
        "reset_attention_mask",
        True,
        "--reset-attention-mask is not .*; leave it out; --dataloader-inter-document-",
    ),
    (
        "reset_position_ids",
        True,
        "--reset-position-ids is not .*; leave it out; --dataloader-inter-document-",
    ),
    ("megatron_fsdp_enable_fine_grained_param_gather", True, "--megatron-fsdp-enable-fine-grained-param-gather is not"),
    ("cpu_offloading", True, "--cpu-offloading-num-layers is not .*; use --upipe-offload host"),
    ("fine_grained_activation_offloading", True, "--fine-grained-activation-offloading .*; use --upipe-offload host"),
    ("mlp_chunks_for_training", 4, "--mlp-chunks-for-training 4 is not .*; use --upipe-mlp-tile-tokens"),
    ("recompute_granularity", "full", "--recompute-granularity full"),
    ("use_torch_fsdp2", True, "--use-torch-fsdp2 is not .*; use --use-megatron-fsdp or"),
]


def settings(**changes):
    return SimpleNamespace(**{**GOOD, **changes})


@pytest.mark.parametrize(("attribute", "value", "message"), BAD)
def test_refuses(attribute, value, message):
    with pytest.raises(UPipeError, match=message):
        check_model(settings(**{attribute: value}), training=True)


def test_takes_what_is_legal():
    check_model(settings(), training=True)
    check_model(settings(position_embedding_type="none", cp_comm_type=["p2p"], cuda_graph_impl="none"), training=True)
    check_model(settings(position_embedding_type="yarn", attention_output_gate=True), training=True)
    check_model(SimpleNamespace())  # attributes of other Megatron versions may be missing
    check_model(settings(recompute_granularity="selective", recompute_modules=["moe_act", "shared_experts"]))
    check_model(settings(mlp_chunks_for_training=1))
    check_model(settings(sft=True, dataloader_inter_document_masking=True), training=True)
    for softmax_type in ("off-by-one", "learnable"):
        check_model(settings(window_size=(128, 0), softmax_type=softmax_type))


def test_weights_sharded_beyond_tensor_parallelism_are_refused():
    check_model(settings(tensor_parallel_num_weight_shards=2, tensor_model_parallel_size=2))
    with pytest.raises(
        UPipeError, match=r"--tensor-parallel-num-weight-shards 4 .*; the nearest is 2, or use --use-meg"
    ):
        check_model(settings(tensor_parallel_num_weight_shards=4, tensor_model_parallel_size=2))


def test_every_rule_is_tried():
    tried = {attribute for attribute, _, _ in BAD}
    untried = {rule.attribute for rule in checks.REFUSALS} - tried
    for attribute in untried:  # switches that are only on or off
        with pytest.raises(UPipeError, match=attribute.replace("_", ".")[:6]):
            check_model(settings(**{attribute: True}), training=True)


def test_recompute_that_does_nothing_is_refused():
    for modules in (["core_attn"], None, ["moe_act", "mlp"], ["layernorm"], ["moe"]):
        with pytest.raises(
            UPipeError, match=r"--recompute-modules \w+ \(core_attn is the default\) does nothing under"
        ):
            check_model(settings(recompute_granularity="selective", recompute_modules=modules))
    with pytest.raises(UPipeError, match=r"--recompute-granularity full .* use --upipe-keep-attention 0"):
        check_model(settings(recompute_granularity="full"))


def parallelism(**changes):
    given = dict(
        query_heads=32,
        kv_heads=8,
        tensor_parallel_size=1,
        context_parallel_size=8,
        hierarchical_sizes=None,
        heads_per_stage=None,
        sequence_length=1024,
        sequence_parallel=False,
    )
    check_parallelism(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(heads_per_stage=12), "--upipe-heads-per-stage 12 .* nearest legal value is 8"),
        (
            dict(query_heads=30, kv_heads=10),
            "--context-parallel-size 8 with P = 8 .* does not fit 30 query heads and 10 KV heads .* nearest that does "
            "is --hierarchical-context-parallel-sizes 2 4",
        ),
        (
            dict(query_heads=8, kv_heads=4, context_parallel_size=3, sequence_length=6),
            "--hierarchical-context-parallel-sizes 1 3",
        ),
        (dict(query_heads=10, kv_heads=4), "--num-query-groups 4 does not divide 10 query heads; .* is 5"),
        (dict(query_heads=8, kv_heads=16), "--num-query-groups 16 does not divide 8 query heads; .* is 8"),
        (dict(hierarchical_sizes=[4, 4]), r"P\*R = 16 is not --context-parallel-size 8"),
        (dict(sequence_length=1002), r"--seq-length 1002 is not a multiple of 16 \(2 x P x R\); .* is 1008"),
        (dict(sequence_length=5), "the nearest multiple is 16"),
        (
            dict(tensor_parallel_size=4, sequence_parallel=True, context_parallel_size=2, sequence_length=1030),
            r"--seq-length 1030 is not a multiple of 16 \(2 x P x R x tensor-parallel size\); .* is 1024",
        ),
        (dict(tensor_parallel_size=16), "--tensor-model-parallel-size 16 does not divide 8 KV heads .* is 8"),
    ],
)
def test_parallelism_refuses_and_names_the_nearest(changes, message):
    with pytest.raises(UPipeError, match=message):
        parallelism(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(heads_per_stage=8),
        dict(hierarchical_sizes=[4, 2]),
        dict(sequence_length=1008),
        dict(tensor_parallel_size=8, context_parallel_size=4),
        dict(tensor_parallel_size=4, sequence_parallel=True, context_parallel_size=2, sequence_length=1024),
        dict(sequence_length=None),
        dict(query_heads=30, kv_heads=10, hierarchical_sizes=[2, 4]),
        dict(query_heads=8, kv_heads=4, context_parallel_size=3, hierarchical_sizes=[1, 3], sequence_length=6),
        dict(query_heads=10, kv_heads=5, context_parallel_size=1),
    ],
)
def test_parallelism_accepts(changes):
    parallelism(**changes)


def test_rope_modes():
    assert UPipeConfig().rope == "stock"
    assert UPipeConfig(rope="exact", rotary=RotarySettings()).rope == "exact"
    with pytest.raises(UPipeError, match="--upipe-rope fast does not exist; choose stock or exact"):
        UPipeConfig(rope="fast")
    with pytest.raises(UPipeError, match="--upipe-rope exact needs the rotary settings"):
        UPipeConfig(rope="exact")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (dict(offload="disk"), "--upipe-offload disk does not exist; choose none or host"),
        (dict(prefetch="yes"), "--upipe-prefetch yes does not exist; choose auto or on or off"),
        (dict(keep_attention=-1), "--upipe-keep-attention -1 is too small; the least is 0"),
        (dict(checkpoint_every=0), "--upipe-checkpoint-every 0 is too small; the least is 1"),
        (dict(mlp_tile_tokens=0), "--upipe-mlp-tile-tokens 0 is too small; the least is 1"),
        (dict(loss_tile_tokens=-5), "--upipe-loss-tile-tokens -5 is too small; the least is 0"),
    ],
)
def test_memory_settings(setting, message):
    with pytest.raises(UPipeError, match=message):
        UPipeConfig(**setting)
    UPipeConfig(offload="host", prefetch="on", keep_attention=0, checkpoint_every=1, mlp_tile_tokens=1)


def test_description_of_what_waits():
    assert UPipeConfig().describe() == (
        "attention kept in all layers, the input of every layer, on the device; MLP tiles 4096 tokens, "
        "loss tiles 1024 tokens"
    )
    host = UPipeConfig(keep_attention=3, checkpoint_every=2, offload="host", loss_tile_tokens=0)
    assert "in 3 layers, the input of every 2nd layer, in host memory" in host.describe()
    assert host.describe().endswith("loss tiles none (Megatron's own)")


@given(st.integers(1, 40), st.integers(1, 6), st.data())
def test_kept_layers_are_spread_over_pipeline_stages(layers, stages, data):
    """As many as asked for, in every stage its share, and there the last ones."""
    keep = data.draw(st.integers(0, layers))
    cuts = sorted(data.draw(st.lists(st.integers(0, layers), min_size=stages - 1, max_size=stages - 1)))
    kept = []
    for first, end in itertools.pairwise([0, *cuts, layers]):
        here = [keeps_attention(keep, layers, first, end - first, i) for i in range(first, end)]
        assert here == sorted(here), "the last layers of the stage"
        assert abs(sum(here) - keep * (end - first) / layers) <= 1
        kept += here
    assert sum(kept) == keep
    assert keeps_attention(None, layers, 0, layers, 0)
