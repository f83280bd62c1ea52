"""Which recipes are taken, for which layers and sizes; each refusal beside something accepted."""

from types import SimpleNamespace

import pytest
import torch

from megatron_upipe.checks import check_fp8, check_fp8_sizes, check_model
from megatron_upipe.errors import UPipeError
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
    sizes = dict(hidden=64, ffn=96, head_dim=16, query_heads=4, kv_heads=2, ulysses_size=1, heads_per_stage=1)
    check_fp8_sizes(Fp8Recipe("tensorwise", True), **sizes)
    with pytest.raises(UPipeError, match=what):
        check_fp8_sizes(Fp8Recipe("tensorwise", True), **{**sizes, **change})


def test_chosen_by_device(monkeypatch):
    recipe = Fp8Recipe("tensorwise", True)
    assert select_precision(None, CUDA, torch.bfloat16) is PLAIN
    assert isinstance(select_precision(recipe, torch.device("cpu"), torch.float64), TwinPrecision)
    monkeypatch.setattr("megatron_upipe.precision.select.import_module", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert isinstance(select_precision(recipe, CUDA, torch.bfloat16), TransformerEnginePrecision)
    with pytest.raises(UPipeError, match="add --bf16"):
        select_precision(recipe, CUDA, torch.float32)
    with pytest.raises(UPipeError, match=r"mxfp8 .* capability 9\.0; use tensorwise or blockwise"):
        select_precision(Fp8Recipe("mxfp8", True), CUDA, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UPipeError, match=r"8\.0; leave --fp8-format out"):
        select_precision(recipe, CUDA, torch.bfloat16)


def test_a_missing_transformer_engine_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(UPipeError, match="pip install"):
        select_precision(Fp8Recipe("tensorwise", True), CUDA, torch.bfloat16)
