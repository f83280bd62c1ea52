"""``with_upipe`` on every kind of stock spec."""

from dataclasses import replace
from functools import partial

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_upipe.attention.linears import UPipeColumnParallelLinear, UPipeRowParallelLinear
from megatron_upipe.attention.module import UPipeSelfAttention
from megatron_upipe.errors import UPipeError
from megatron_upipe.layer_specs import upipe_layer_spec, with_upipe
from megatron_upipe.layers.transformer_layer import UPipeTransformerLayer


def is_upipe(submodules, stock):
    attention = submodules.self_attention
    assert attention.module is UPipeSelfAttention
    assert attention.params == stock.self_attention.params
    assert attention.submodules.linear_qkv is UPipeColumnParallelLinear
    assert attention.submodules.linear_proj is UPipeRowParallelLinear
    for kept in ("core_attention", "q_layernorm", "k_layernorm"):
        assert getattr(attention.submodules, kept) is getattr(stock.self_attention.submodules, kept)
    if stock.mlp.func == MLP.as_mlp_submodule:
        linears = submodules.mlp.keywords["submodules"]
        assert (linears.linear_fc1, linears.linear_fc2) == (UPipeColumnParallelLinear, UPipeRowParallelLinear)
    else:
        assert submodules.mlp == stock.mlp
    assert submodules.pre_mlp_layernorm is stock.pre_mlp_layernorm
    return True


@pytest.mark.parametrize(
    "arguments", [{}, dict(normalization="RMSNorm", qk_layernorm=True), dict(num_experts=2), dict(qk_l2_norm=True)]
)
def test_local_layer(arguments):
    stock = get_gpt_layer_local_spec(**arguments)
    changed = with_upipe(stock)
    assert stock.module is TransformerLayer and changed.module is UPipeTransformerLayer
    assert is_upipe(changed.submodules, stock.submodules)
    assert changed.submodules.sharded_state_dict_keys_map == stock.submodules.sharded_state_dict_keys_map
    assert stock.submodules.self_attention.module is SelfAttention, "the argument is not changed"
    assert with_upipe(changed).submodules.self_attention.module is UPipeSelfAttention


@pytest.mark.parametrize("experts", [None, 2])
def test_local_block(workers, experts):
    assert workers.run(1, _block, experts) == [True]


def _block(rank, experts):
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=4,
        hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=experts,
        moe_layer_freq=[1, 0, 1, 0] if experts else 1,
    )
    stock = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    changed = with_upipe(stock)
    assert len(changed.layer_specs) == 4 and changed.layer_norm is stock.layer_norm
    pairs = zip(changed.layer_specs, stock.layer_specs, strict=True)
    return all(is_upipe(c.submodules, s.submodules) for c, s in pairs)


class FakeTELayerNormColumnParallelLinear:
    """Stands for TransformerEngine's linear with the input norm inside."""


def test_transformer_engine_layer(monkeypatch):
    """Norms that TransformerEngine fuses into linears become norms before them, under the same checkpoint keys."""
    from megatron.core.extensions import transformer_engine

    norm = type("TENorm", (), {})
    monkeypatch.setattr(transformer_engine, "TENorm", norm)
    stock = get_gpt_layer_local_spec().submodules
    attention = replace(stock.self_attention.submodules, linear_qkv=FakeTELayerNormColumnParallelLinear)
    linears = replace(stock.mlp.keywords["submodules"], linear_fc1=FakeTELayerNormColumnParallelLinear)
    te = replace(
        stock,
        mlp=partial(stock.mlp.func, submodules=linears),
        input_layernorm=IdentityOp,
        pre_mlp_layernorm=IdentityOp,
        self_attention=replace(stock.self_attention, submodules=attention),
        sharded_state_dict_keys_map={"mlp.0.weight": "mlp.linear_fc1.layer_norm_weight"},
    )
    changed = with_upipe(te)
    assert changed.self_attention.submodules.linear_qkv is UPipeColumnParallelLinear
    assert changed.mlp.keywords["submodules"].linear_fc1 is UPipeColumnParallelLinear
    assert changed.input_layernorm is norm and changed.pre_mlp_layernorm is norm
    assert changed.sharded_state_dict_keys_map == {
        "mlp.0.weight": "mlp.linear_fc1.layer_norm_weight",
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }


def test_refuses_what_is_no_plain_attention():
    mla = get_gpt_layer_local_spec(multi_latent_attention=True)
    with pytest.raises(UPipeError, match="MLASelfAttention is not supported by UPipe"):
        with_upipe(mla)
    with pytest.raises(UPipeError, match="takes a Megatron layer or block spec, not a str"):
        with_upipe("spec")
    with pytest.raises(UPipeError, match="needs a spec with submodules"):
        with_upipe(ModuleSpec(module=TransformerLayer))
    crossed = replace(get_gpt_layer_local_spec().submodules, cross_attention=SelfAttention)
    with pytest.raises(UPipeError, match="SelfAttention as cross-attention is not supported"):
        with_upipe(crossed)
    bare = replace(get_gpt_layer_local_spec().submodules, self_attention=SelfAttention)
    with pytest.raises(UPipeError, match="SelfAttention is not supported"):
        with_upipe(bare)
    normless = replace(get_gpt_layer_local_spec().submodules, input_layernorm=IdentityOp)
    with pytest.raises(UPipeError, match="the spec has no norm before linear_qkv"):
        with_upipe(normless)


def test_the_spec_object():
    assert isinstance(upipe_layer_spec, ModuleSpec) and issubclass(upipe_layer_spec.module, TransformerLayer)
