"""Which recipes are taken, for which layers and sizes; each refusal beside something accepted."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_upipe.attention.schedule import head_schedule
from megatron_upipe.checks import check_fp8, check_fp8_attention, check_fp8_sizes, check_model
from megatron_upipe.errors import UPipeError
from megatron_upipe.kernels.flash_attn_2 import FlashAttn2Kernel
from megatron_upipe.kernels.te_fused import TransformerEngineKernel
from megatron_upipe.precision.plain import PLAIN
from megatron_upipe.precision.recipes import ALIGNMENT, Fp8Recipe, check_alignment, fp8_recipe, layer_recipe
from megatron_upipe.precision.select import select_precision
from megatron_upipe.precision.transformer_engine import TransformerEnginePrecision
from megatron_upipe.precision.twin import TwinPrecision

CUDA = torch.device("cuda")


def config(recipe="tensorwise", form="hybrid", **others):
    base = dict(fp8=form, fp8_recipe=recipe, num_layers=6, first_last_layers_bf16=False, transformer_impl="local")
    return SimpleNamespace(**{**base, **others})


@pytest.mark.parametrize("recipe", ALIGNMENT)
@pytest.mark.parametrize("form", ["hybrid", "e4m3"])
def test_accepted(recipe, form):
    assert fp8_recipe(config(recipe, form)) == Fp8Recipe(recipe, form == "hybrid")
    check_fp8(config(recipe, form))
    check_model(config(recipe, form))


@pytest.mark.parametrize(("recipe", "reason"), [("delayed", "earlier calls"), ("custom", "main_grad"), ("x", "known")])
def test_refused(recipe, reason):
    with pytest.raises(
        UPipeError, match=f"--fp8-recipe {recipe}.* is not .*{reason}.*use tensorwise or blockwise or mxfp8"
    ):
        fp8_recipe(config(recipe))


def test_no_fp8():
    assert fp8_recipe(config(form=None)) is None and fp8_recipe(SimpleNamespace()) is None


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        (dict(fp8_param=True), "--fp8-param-gather"),
        (dict(fp8_output_proj=True), "--fp8-output-proj"),
        (dict(fp8_dot_product_attention=True), "--upipe-fp8-attention"),
        (dict(fp8_wgrad=False), "--no-fp8-wgrad"),
        (dict(num_moe_experts=4), "--transformer-impl transformer_engine"),
        (dict(fp4="e2m1"), "--fp4-format"),
    ],
)
def test_settings_that_do_not_go_with_it(changes, flag):
    with pytest.raises(UPipeError, match=flag):
        check_model(config(**changes))
    check_model(config(num_moe_experts=4, transformer_impl="transformer_engine", fp8_wgrad=True))


def test_first_and_last_layers_in_bf16():
    bf16 = config(first_last_layers_bf16=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2)
    assert [layer_recipe(bf16, number) is None for number in range(1, 7)] == [True, False, False, False, True, True]
    assert layer_recipe(config(), 1) is not None


@pytest.mark.parametrize("recipe", ALIGNMENT)
def test_alignment(recipe):
    unit = ALIGNMENT[recipe]
    check_alignment(Fp8Recipe(recipe, True), {"--hidden-size": 5 * unit})
    with pytest.raises(UPipeError, match=f"multiples of {unit}, but --hidden-size is {5 * unit + 1}.* {5 * unit}$"):
        check_alignment(Fp8Recipe(recipe, True), {"--hidden-size": 5 * unit + 1})
    with pytest.raises(UPipeError, match=f"the nearest is {unit}$"):
        check_alignment(Fp8Recipe(recipe, True), {"--hidden-size": 1})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (dict(hidden=200), "--hidden-size is 200"),
        (dict(head_dim=8), "a stage's queries .* is 8"),
        (dict(ffn=100), "--ffn-hidden-size / --tensor-model-parallel-size is 100"),
    ],
)
def test_sizes_of_a_layer(change, what):
    sizes, schedule = dict(hidden=64, ffn=96, head_dim=16), head_schedule(4, 2, 1, 1)
    check_fp8_sizes(Fp8Recipe("tensorwise", True), schedule, **sizes)
    check_fp8_sizes(Fp8Recipe("tensorwise", True), schedule, **{**sizes, "ffn": None})
    with pytest.raises(UPipeError, match=what):
        check_fp8_sizes(Fp8Recipe("tensorwise", True), schedule, **{**sizes, **change})


def test_sizes_of_keys_and_values():
    """P = 8 ranks attend 2 KV heads: 4 copies of each, projected once."""
    schedule = head_schedule(16, 2, 8, 8)
    check_fp8_sizes(Fp8Recipe("mxfp8", True), schedule, hidden=64, ffn=None, head_dim=16)
    with pytest.raises(UPipeError, match=r"a stage's keys and values .2 x 2 x --kv-channels 4. is 16"):
        check_fp8_sizes(Fp8Recipe("mxfp8", True), schedule, hidden=64, ffn=None, head_dim=4)


@pytest.mark.parametrize(
    ("mode", "heads_per_stage", "change", "message"),
    [
        ("forward", 2, dict(tokens=192), "multiples of 128 tokens .* not 192; the nearest is 256"),
        ("full", 8, dict(tokens=128, ring_size=2), "multiples of 256 tokens .* not 128; the nearest is 256"),
        ("full", 2, {}, "query heads of a stage, not 1 x 64; raise --upipe-heads-per-stage 2, or use off"),
        ("full", 4, {}, "KV heads of a stage, not 1 x 64; raise --upipe-heads-per-stage 4"),
    ],
)
def test_sizes_of_fp8_attention(mode, heads_per_stage, change, message):
    sizes = dict(tokens=256, ring_size=1, head_dim=64)
    schedule = head_schedule(8, 4, 2, heads_per_stage)
    with pytest.raises(UPipeError, match=message):
        check_fp8_attention(mode, schedule, **{**sizes, **change})
    check_fp8_attention("off", schedule, **{**sizes, **change})
    check_fp8_attention("forward", schedule, **sizes)
    check_fp8_attention("full", head_schedule(8, 4, 2, 8), **{**sizes, "ring_size": 2})
    check_fp8_attention("full", head_schedule(8, 4, 2, 2), **{**sizes, "head_dim": 128})


@pytest.fixture
def te(monkeypatch):
    """A TransformerEngine that says what a GPU has."""
    package, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    package.__version__, package.pytorch = "2.20.2", pytorch
    for name, answer in (("fp8", (True, "")), ("mxfp8", (False, "Device compute capability 10.x required.")), *BLOCK):
        setattr(pytorch, f"is_{name}_available", lambda return_reason, answer=answer: answer)
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", pytorch)
    return package


BLOCK = [("fp8_block_scaling", (True, ""))]


def test_chosen_by_device(te):
    recipe = Fp8Recipe("tensorwise", True)
    assert select_precision(None, CUDA, torch.bfloat16) is PLAIN
    assert isinstance(select_precision(recipe, torch.device("cpu"), torch.float64), TwinPrecision)
    assert isinstance(select_precision(recipe, CUDA, torch.bfloat16), TransformerEnginePrecision)
    with pytest.raises(UPipeError, match="add --bf16"):
        select_precision(recipe, CUDA, torch.float32)
    with pytest.raises(UPipeError, match=r"mxfp8 cannot run .*: Device .* 10\.x required; use tensorwise or blockwise"):
        select_precision(Fp8Recipe("mxfp8", True), CUDA, torch.bfloat16)
    te.pytorch.is_fp8_available = te.pytorch.is_fp8_block_scaling_available = lambda return_reason: (False, "no")
    with pytest.raises(UPipeError, match="tensorwise cannot run on this GPU: no; leave --fp8-format out"):
        select_precision(recipe, CUDA, torch.bfloat16)


def test_an_old_transformer_engine(te):
    te.__version__ = "2.18.0"
    with pytest.raises(UPipeError, match=r"TransformerEngine: version 2\.18\.0 is older than 2\.20; pip install"):
        select_precision(Fp8Recipe("tensorwise", True), CUDA, torch.bfloat16)


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError])
def test_a_transformer_engine_that_does_not_load(monkeypatch, error):
    def broken(name):
        raise error("libnccl.so.2: cannot open shared object file")

    monkeypatch.setattr("megatron_upipe.precision.te_package.import_module", broken)
    monkeypatch.setattr("megatron_upipe.kernels.conventions.import_module", broken)
    with pytest.raises(UPipeError, match=r"cannot be imported .libnccl.*pip install"):
        select_precision(Fp8Recipe("tensorwise", True), CUDA, torch.bfloat16)
    assert "libnccl" in TransformerEngineKernel().refuses(CUDA, torch.bfloat16, 64)
    assert "libnccl" in FlashAttn2Kernel().refuses(CUDA, torch.bfloat16, 64)
