"""Against TransformerEngine itself, without a GPU: ``make test-te``."""

import inspect
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from te import recorded

from megatron_upipe.precision.twin import E4M3, E5M2, quantise_blocks, quantise_tensor

pytestmark = [
    pytest.mark.te,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs TransformerEngine: make test-te"),
]


@pytest.mark.parametrize(("module", "function"), [(m, f) for m, names in recorded.FUNCTIONS.items() for f in names])
def test_recorded_signatures_are_the_real_ones(module, function):
    import_module(recorded.P)
    real, ours = (
        inspect.signature(f).parameters
        for f in (getattr(import_module(module), function), recorded.MODULES[module][function])
    )
    assert list(real) == list(ours)
    for name, parameter in real.items():
        assert (parameter.kind, parameter.default) == (ours[name].kind, ours[name].default), name


@pytest.mark.parametrize(
    ("module", "kind"),
    [(m, k) for m, kinds in recorded.MODULES.items() if ".tensor." in m for k in kinds if k.endswith("Quantizer")],
)
def test_recorded_quantizers_are_made_like_the_real_ones(module, kind):
    import_module(recorded.P)
    real, ours = (
        inspect.signature(c.__init__).parameters
        for c in (getattr(import_module(module), kind), recorded.MODULES[module][kind])
    )
    assert list(real) == list(ours)
    for name, parameter in real.items():
        assert (parameter.kind, parameter.default) == (ours[name].kind, ours[name].default), name


@pytest.mark.parametrize("recipe", ["Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"])
@pytest.mark.parametrize("form", ["HYBRID", "E4M3"])
def test_recipes_make_the_quantizers_that_are_recorded(recipe, form):
    import_module(recorded.P)
    recipes = import_module("transformer_engine.common.recipe")
    real = getattr(recipes, recipe)(fp8_format=recipes.Format[form])
    ours = getattr(recorded, recipe)(fp8_format=form)
    create = import_module(f"{recorded.P}.quantization").RecipeState.create
    for mode, number in (("forward", 2), ("backward", 1)):
        theirs = create(real, mode=mode, num_quantizers=number, device=torch.device("cpu")).make_quantizers()
        mine = recorded.RecipeState.create(ours, mode=mode, num_quantizers=number).make_quantizers()
        for a, b in zip(theirs, mine, strict=True):
            assert type(a).__name__ == type(b).__name__ and a.dtype.name == b.dtype.name
            assert getattr(a, "block_scaling_dim", None) == getattr(b, "block_scaling_dim", None)
            assert getattr(a, "force_pow_2_scales", None) in (None, recipe == "Float8BlockScaling")
    for product in ("fprop", "dgrad", "wgrad"):
        theirs, mine = (getattr(r, f"fp8_gemm_{product}", None) for r in (real, ours))
        assert (theirs and theirs.use_split_accumulator) == (mine and mine.use_split_accumulator)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, 1e20])
def test_current_scaling_equals_the_reference_quantizer_bit_for_bit(dtype, source, size):
    """The one pure-torch reference quantizer for FP8 that the package has."""
    import_module(recorded.P)
    reference = import_module(f"{recorded.P}.custom_recipes.reference_current_scaling").CurrentScalingQuantizerRef
    torch.manual_seed(0)
    x = torch.randn(64, 96, dtype=source) * size
    theirs, ours = reference(dtype).quantize(x), quantise_tensor(x, dtype)
    assert torch.equal(theirs.data.view(torch.uint8), ours.data.view(torch.uint8))
    assert torch.equal(theirs.scale, ours.scale_inv)


def test_specs_on_its_modules():
    """The classes that upipe_te_layer_spec puts in; building them needs a GPU."""
    import_module(recorded.P)
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

    from megatron_upipe.layers.submodules import te_linears

    linears = te_linears()
    assert issubclass(linears.column, TEColumnParallelLinear) and issubclass(linears.row, TERowParallelLinear)


def test_checkpoint_keys_are_those_of_the_stock_layer(monkeypatch):
    """Both built without a GPU, which is all that can be done with them here."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module

    from megatron_upipe.integration.selftest.parity import Case, make_config
    from megatron_upipe.layer_specs import upipe_layer_spec, upipe_te_layer_spec

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        config = make_config(Case(), 1, 1, transformer_impl="transformer_engine")
        groups = ProcessGroupCollection.use_mpu_process_groups()
        stock, te, own = (
            build_module(spec, config=config, layer_number=1, pg_collection=groups)
            for spec in (get_gpt_layer_with_transformer_engine_spec(), upipe_te_layer_spec, upipe_layer_spec)
        )
        keys = {entry.key for entry in stock.sharded_state_dict().values()}
        for layer in (te, own):
            entries = layer.sharded_state_dict().values()
            assert {entry.key for entry in entries if hasattr(entry, "key")} == keys
        assert type(te.mlp.linear_fc2).__name__ == "UPipeTERowParallelLinear"
        weight, bias = te.self_attention.linear_qkv()
        assert weight is te.self_attention.linear_qkv.weight and bias is None
    finally:
        monkeypatch.undo()
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@pytest.mark.skipif("TRANSFORMER_ENGINE" not in os.environ, reason="set TRANSFORMER_ENGINE to a checkout")
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [0.0, 1e-36, 1e-30, 1.0, 1e20])
def test_blockwise_equals_the_repositorys_reference_quantizer_bit_for_bit(monkeypatch, dtype, source, size):
    monkeypatch.syspath_prepend(Path(os.environ["TRANSFORMER_ENGINE"]) / "tests" / "pytorch")
    reference = import_module("references.blockwise_quantizer_reference").BlockwiseQuantizerReference()
    torch.manual_seed(0)
    x = torch.randn(200, 300, dtype=source) * size * torch.exp(4 * torch.randn(200, 300)).to(source)
    common = dict(pow_2_scales=True, munge_scale_shapes=False)
    rows = reference.quantize(x, dtype, return_transpose=True, quant_tile_shape=(1, 128), **common)
    squares = reference.quantize(x, dtype, quant_tile_shape=(128, 128), **common)
    for block, data, scale in (
        ((1, 128), rows.data, rows.scale),
        ((128, 1), rows.data_t.t(), rows.scale_t.t()),
        ((128, 128), squares.data, squares.scale),
    ):
        ours = quantise_blocks(x, dtype, block, mx=False)
        assert torch.equal(ours.data.view(torch.uint8), data.contiguous().view(torch.uint8)), block
        assert torch.equal(ours.scale_inv, scale), block
