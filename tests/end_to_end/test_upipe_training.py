"""UPipe in Megatron's training loop: the stock run's losses, from scratch and from a stock checkpoint."""

import os

import pytest
from end_to_end.training import MODEL, TRAINING, launch, some_slow, torchrun, train

UPIPE = ["--spec", "megatron_upipe.layer_specs", "upipe_layer_spec"]
CP2 = [*UPIPE, "--context-parallel-size", "2"]
USP = [*UPIPE, "--context-parallel-size", "4", "--hierarchical-context-parallel-sizes", "2", "2"]
TOLERANCE = 1e-4  # of losses, fp32
NORM_TOLERANCE = 1e-3  # of gradient norms: Adam turns rounding of tiny gradients into steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("upipe")


@pytest.fixture(scope="module")
def stock(folder):
    """The stock spec on one rank, with a checkpoint after every second iteration."""
    return train(folder, "stock", 1, "--save", str(folder / "checkpoint"), "--save-interval", "2")


def assert_close(found, expected):
    for key, value in found.items():
        tolerance = NORM_TOLERANCE if key.startswith("grad norm") else TOLERANCE
        assert abs(value - expected[key]) <= tolerance * abs(expected[key]), (key, found, expected)


LAYOUTS = {
    "P 2 x R 2": (4, [*USP, "--upipe-heads-per-stage", "4"]),
    "data parallel 2, overlapped": (4, [*CP2, "--overlap-grad-reduce", "--overlap-param-gather"]),
    "TP 2 + sequence parallel": (4, [*CP2, "--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "pipeline 2": (4, [*CP2, "--pipeline-model-parallel-size", "2", "--calculate-per-token-loss"]),
    "one context-parallel rank": (1, [*UPIPE]),
    "exact rope": (2, [*CP2, "--upipe-rope", "exact"]),
    "host store": (
        2,
        [
            *(*CP2, "--upipe-offload", "host", "--upipe-prefetch", "on", "--upipe-keep-attention", "1"),
            *("--upipe-mlp-tile-tokens", "7", "--upipe-loss-tile-tokens", "5"),
        ],
    ),
    "every 2nd input, TP 2 + sequence parallel": (
        4,
        [
            *(*CP2, "--tensor-model-parallel-size", "2", "--sequence-parallel"),
            *("--upipe-keep-attention", "0", "--upipe-checkpoint-every", "2", "--upipe-mlp-tile-tokens", "20"),
        ],
    ),
    "Megatron's own loss": (2, [*CP2, "--upipe-loss-tile-tokens", "0"]),
}


SLOW = ("exact rope", "Megatron's own loss", "pipeline 2")
SLOW += ("every 2nd input, TP 2 + sequence parallel", "data parallel 2, overlapped")
# with Megatron-FSDP
SLOW += ("data parallel alone", "2 ranks", "2 ranks, overlapped", "context 2 x data 2", "TP 2 x context 2")


@pytest.mark.parametrize("name", some_slow(LAYOUTS, *SLOW))
def test_trains_as_stock_does(folder, stock, name):
    ranks, flags = LAYOUTS[name]
    found = train(folder, name, ranks, *flags)
    assert set(found) == set(stock)
    if name == "pipeline 2":
        # without tied embeddings each stage starts from its own seed; compare with the stock spec on two stages
        reference = train(folder, "stock pipeline", 2, "--pipeline-model-parallel-size", "2")
        assert_close(found, reference)
    else:
        assert_close(found, stock)


@pytest.mark.slow
def test_virtual_pipeline_stages_train_as_stock_does(folder):
    """Two model chunks on each stage, evaluation included."""
    flags = ["--num-layers", "4", "--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"]
    flags += ["--micro-batch-size", "1"]
    wanted = train(folder, "stock virtual", 2, *flags)
    assert_close(train(folder, "virtual", 4, *flags, *CP2, "--calculate-per-token-loss"), wanted)


@pytest.mark.slow
def test_fp8_trains_as_16_bits_do(folder):
    """The twin, of products and of attention's forward; losses differ, by no more than FP8's noise."""
    sizes = ["--kv-channels", "16", *CP2, "--bf16", "--upipe-offload", "host", "--upipe-mlp-tile-tokens", "32"]
    sizes += ["--seq-length", "128", "--max-position-embeddings", "128"]
    wanted = train(folder, "bf16", 2, *sizes)
    fp8 = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise", "--upipe-fp8-attention", "forward"]
    found = train(folder, "fp8", 2, *sizes, *fp8)
    assert set(found) == set(wanted)
    differences = [abs(found[key] / wanted[key] - 1) for key in wanted if "loss" in key]
    assert 1e-5 < max(differences) < 0.01, differences


@pytest.mark.slow
def test_mixture_of_experts_trains_as_stock_does(folder):
    """Load-balancing loss over all shards' tokens, counted once though the layer runs again in backward."""
    experts = [
        *("--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "allgather"),
        *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-1", "--moe-z-loss-coeff", "1e-3"),
    ]
    waits = ["--upipe-offload", "host", "--upipe-keep-attention", "0", "--upipe-checkpoint-every", "2"]
    wanted = train(folder, "stock experts", 1, *experts)
    assert_close(train(folder, "experts", 2, *CP2, *experts, *waits), wanted)


FSDP = [
    *(
        "--use-megatron-fsdp",
        "--data-parallel-sharding-strategy",
        "optim_grads_params",
        "--ckpt-format",
        "fsdp_dtensor",
    ),
    *("--megatron-fsdp-main-grads-dtype", "fp32"),
]
FSDP_LAYOUTS = {
    "data parallel alone": (2, UPIPE),
    "TP 2 x context 2": (4, [*CP2, "--tensor-model-parallel-size", "2"]),
    "2 ranks": (2, [*CP2, "--upipe-offload", "host", "--upipe-keep-attention", "1", "--upipe-mlp-tile-tokens", "9"]),
    "2 ranks, overlapped": (2, [*CP2, "--overlap-grad-reduce", "--overlap-param-gather"]),
    "context 2 x data 2": (4, CP2),
    "context 2 x data 2, overlapped, every 2nd input": (
        4,
        [*CP2, "--overlap-grad-reduce", "--overlap-param-gather", "--upipe-checkpoint-every", "2"],
    ),
}


@pytest.mark.parametrize("name", some_slow(FSDP_LAYOUTS, *SLOW))
def test_megatron_fsdp_trains_as_stock_does(folder, stock, name):
    ranks, flags = FSDP_LAYOUTS[name]
    found = train(folder, f"fsdp {name}", ranks, *flags, *FSDP, distributed_optimizer=False)
    assert set(found) == set(stock)
    assert_close(found, stock)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_small_buckets(folder, stock, overlap):
    """Every parameter in a bucket of its own: a weight read past its module's call would be stale."""
    flags = ["--overlap-grad-reduce", "--overlap-param-gather"] if overlap else []
    found = train(folder, f"buckets {overlap}", 4, *CP2, *flags, "--ddp-bucket-size", "64")
    assert_close(found, stock)


def test_stock_checkpoint_trains_on_under_upipe(folder, stock):
    """The headline: switched on in the middle of a run, the curve is the stock run's."""
    (folder / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("2")
    # parallelism changes, so the saved random state of one rank is left out
    found = train(folder, "continued", 4, *USP, "--load", str(folder / "checkpoint"), "--no-load-rng")
    assert {"lm loss 3", "lm loss 5", "grad norm 5", "test lm loss 5"} <= set(found) and "lm loss 2" not in found
    assert_close(found, stock)


@pytest.mark.slow
def test_upipe_checkpoint_trains_on_under_stock_and_resumes_bit_for_bit(folder, stock):
    saved = folder / "upipe checkpoint"
    reshardable = ["--dist-ckpt-optim-fully-reshardable"]  # Megatron needs it when TP changes
    straight = train(folder, "saving", 2, *CP2, *reshardable, "--save", str(saved), "--save-interval", "2")
    assert_close(straight, stock)
    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    tensor_parallel = ["--tensor-model-parallel-size", "2", "--no-load-rng", *reshardable]
    second = folder / "stock checkpoint with TP 2"
    back = train(
        folder, "back", 2, *tensor_parallel, "--load", str(saved), "--save", str(second), "--save-interval", "3"
    )
    assert {"lm loss 3", "lm loss 5"} <= set(back)
    assert_close(back, stock)
    (second / "latest_checkpointed_iteration.txt").write_text("3")
    again = train(folder, "again", 4, *USP, "--no-load-rng", *reshardable, "--load", str(second))
    assert {"lm loss 4", "lm loss 5"} <= set(again) and "lm loss 3" not in again
    assert_close(again, stock)
    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(folder, "resumed", 2, *CP2, *reshardable, "--load", str(saved))
    assert {"lm loss 3", "grad norm 5", "test lm loss 5"} <= set(resumed) and "lm loss 2" not in resumed
    assert resumed == {key: straight[key] for key in resumed}


def test_plan_is_printed_once(folder):
    done = launch(2, *MODEL, *TRAINING, *CP2, "--data-cache-path", str(folder / "cache"))
    assert done.returncode == 0
    plans = [line for line in done.stdout.splitlines() if "stages of U" in line]
    assert plans == [
        "megatron_upipe: 8 query and 4 KV heads of size 6 per tensor-parallel rank, 4 stages of U = 2 heads, "
        "P = 2 (Ulysses) x R = 1 (ring), kernel torch-cpu, exchange by gloo, beside attention, rope stock"
    ]
    assert done.stdout.count("--no-create-attention-mask-in-dataloader set") == 1


def _refused(*flags, start=launch):
    done = start(2, *MODEL, *TRAINING, *flags)
    assert done.returncode != 0 and "[rank0]" not in done.stderr, done.stderr[-3000:]
    errors = {line for line in done.stderr.splitlines() if line.startswith("megatron_upipe: error")}
    assert len(errors) == 1
    return errors.pop()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*CP2, "--upipe-heads-per-stage", "3"], "--upipe-heads-per-stage 3 is not possible"),
        ([*CP2, "--reset-attention-mask"], "--reset-attention-mask is not supported by UPipe"),
        (["--upipe-heads-per-stage", "2"], "--upipe-heads-per-stage does nothing without the spec"),
    ],
)
def test_refused_before_training(flags, message):
    assert message in _refused(*flags)


SPEC_WITH_A_STOCK_LAYER = """
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron_upipe.layer_specs import with_upipe
def spec(config):
    return get_gpt_layer_local_spec(normalization="RMSNorm")  # with_upipe is forgotten
"""


def test_a_run_without_upipe_layers_stops(folder, monkeypatch):
    """A spec that means UPipe but builds stock attention."""
    (folder / "forgetful_specs.py").write_text(SPEC_WITH_A_STOCK_LAYER)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    message = _refused("--spec", "forgetful_specs", "spec")
    assert "2 of 2 attention layers are not UPipe, the first" in message and "(SelfAttention)" in message


MY_SPECS = """
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron_upipe.layer_specs import with_upipe
layer = with_upipe(get_gpt_layer_local_spec(normalization="RMSNorm"))
def made(config):
    return layer
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layer", "made"])
def test_a_spec_of_the_users_own(folder, stock, monkeypatch, name):
    """Flags, checks and settings reach a spec made by with_upipe in another module."""
    (folder / "my_specs.py").write_text(MY_SPECS)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    mine = ["--spec", "my_specs", name, "--context-parallel-size", "2", "--upipe-heads-per-stage", "4"]
    assert_close(train(folder, f"own {name}", 2, *mine), stock)
    assert "--reset-position-ids is not supported by UPipe" in _refused(*mine, "--reset-position-ids")


def test_import_error_in_the_spec_module_is_loud(folder, monkeypatch):
    """Megatron would swallow it and train the stock model."""
    hidden = folder / "hidden" / "sitecustomize.py"
    hidden.parent.mkdir()
    hidden.write_text("import sys; sys.modules['megatron_upipe.layers.transformer_layer'] = None\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hidden.parent), os.environ.get("PYTHONPATH", "")]))
    assert "megatron_upipe.layer_specs cannot be imported" in _refused(*CP2, start=torchrun)
