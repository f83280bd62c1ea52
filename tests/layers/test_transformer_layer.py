"""The whole Megatron layer, from the spec object, against the stock layer in fp64."""

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron_upipe.context.layout import SequenceLayout
from megatron_upipe.errors import UPipeError
from megatron_upipe.integration.selftest.parity import (
    TOLERANCE,
    Case,
    _randomise,
    initialize,
    local,
    make_config,
    relative_error,
    rotary_table,
    single_rank_groups,
)

SWIGLU = dict(gated_linear_unit=True, activation_func=torch.nn.functional.silu, bias_activation_fusion=False)
CONFIGURATIONS = {
    "llama": SWIGLU,
    "gpt": dict(normalization="LayerNorm", add_bias_linear=True, bias_activation_fusion=False),
    "qwen": dict(**SWIGLU, qk_layernorm=True, add_qkv_bias=True),
    "mixture of experts": dict(**SWIGLU, num_moe_experts=2, moe_router_load_balancing_type="none"),
}


def _layers(case, p, r):
    from megatron_upipe.layer_specs import upipe_layer_spec

    assert isinstance(upipe_layer_spec, ModuleSpec)
    config = make_config(case, 1, 1)
    spec = get_gpt_layer_local_spec(
        config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    groups = single_rank_groups()
    torch.manual_seed(3)
    if config.num_moe_experts:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        groups.cp = groups.tp
    stock = build_module(spec, config=config, layer_number=1, pg_collection=groups).double()
    _randomise(stock)
    upipe = build_module(
        upipe_layer_spec,
        config=make_config(case, p, r),
        layer_number=1,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    ).double()
    upipe.load_state_dict(stock.state_dict())
    return stock, upipe


def _compare(rank, p, r, case):
    initialize(p, r)
    stock, upipe = _layers(case, p, r)
    layout, rank = SequenceLayout(p, r), parallel_state.get_context_parallel_rank()
    length = 2 * layout.size * case.chunk
    torch.manual_seed(9)
    x, dy = (torch.randn(length, case.micro_batch, case.hidden, dtype=torch.float64) for _ in range(2))
    table = rotary_table(case, length)
    whole, shard = x.clone().requires_grad_(), local(x, layout, rank).requires_grad_()
    wanted = stock(whole, None, rotary_pos_emb=table)[0]
    wanted.backward(dy)
    found = upipe(shard, None, rotary_pos_emb=local(table, layout, rank))[0]
    found.backward(local(dy, layout, rank))
    errors = {
        "output": relative_error(found.detach(), local(wanted.detach(), layout, rank)),
        "dx": relative_error(shard.grad, local(whole.grad, layout, rank)),
    }
    gradients = dict(upipe.named_parameters())
    for name, parameter in stock.named_parameters():
        if parameter.grad is None:
            continue
        gradient = gradients[name].grad.clone()
        dist.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
        errors[name] = relative_error(gradient, parameter.grad)
    return errors


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_layer_equals_stock(workers, name):
    # the router of the mixture of experts works in fp32 in both
    tolerance = 1e-5 if name == "mixture of experts" else TOLERANCE
    for errors in workers.run(4, _compare, 2, 2, Case(config=CONFIGURATIONS[name])):
        assert len(errors) >= 8 and max(errors.values()) <= tolerance, errors


def _state_dicts(rank):
    """Parameter names, shapes and checkpoint keys are the stock layer's."""
    initialize(2, 1)
    stock, upipe = _layers(Case(config=SWIGLU), 2, 1)
    shapes = [{n: tuple(p.shape) for n, p in layer.named_parameters()} for layer in (stock, upipe)]
    keys = [set(layer.sharded_state_dict(prefix="layer.")) for layer in (stock, upipe)]
    before = {n: p.detach().clone() for n, p in upipe.named_parameters()}
    x = torch.randn(6, 1, 28, dtype=torch.float64, requires_grad=True)
    upipe(x, None)[0].sum().backward()
    unchanged = all(torch.equal(before[n], p) for n, p in upipe.named_parameters())
    return (
        shapes[0] == shapes[1]
        and keys[0] == keys[1]
        and unchanged
        and set(upipe.state_dict()) == set(stock.state_dict())
    )


def test_names_shapes_and_checkpoint_keys_are_stock(workers):
    assert workers.run(2, _state_dicts) == [True, True]


def _with_extra_state(rank):
    """Norms with a state of their own, as TransformerEngine's; in checkpoints they are inside the linears."""
    initialize(2, 1)
    _, upipe = _layers(Case(config=SWIGLU), 2, 1)
    plain = {entry.key for entry in upipe.sharded_state_dict(prefix="layer.").values()}
    for norm in (upipe.input_layernorm, upipe.pre_mlp_layernorm):
        state = {"get_extra_state": lambda self: torch.empty(0), "set_extra_state": lambda self, state: None}
        norm.__class__ = type("Norm", (type(norm),), state)
    found = upipe.sharded_state_dict(prefix="layer.")
    local = [name for name, entry in found.items() if isinstance(entry, LocalNonpersistentObject)]
    stored = {entry.key for name, entry in found.items() if name not in local}
    return local, stored == plain


def test_norms_of_transformer_engine_add_no_checkpoint_keys(workers):
    local = ["layer.input_layernorm._extra_state", "layer.pre_mlp_layernorm._extra_state"]
    assert workers.run(2, _with_extra_state) == [(local, True)] * 2


def _refused_at_build(rank):
    from megatron_upipe.layer_specs import upipe_layer_spec, upipe_te_layer_spec

    initialize(2, 1)
    messages = []
    cases = [
        Case(heads_per_stage=8),
        Case(config=dict(attention_dropout=0.1)),
        Case(heads=9, kv_heads=3),
        Case(config=dict(window_size=(4, 4))),
        Case(config=dict(fp8="hybrid", fp8_recipe="tensorwise")),
    ]
    groups = ProcessGroupCollection.use_mpu_process_groups()
    for case in cases:
        with pytest.raises(UPipeError) as refused:
            build_module(upipe_layer_spec, config=make_config(case, 2, 1), layer_number=1, pg_collection=groups)
        messages.append(str(refused.value))
    alone = make_config(Case(config=dict(fp8="hybrid", fp8_recipe="tensorwise")), 1, 1)
    for spec in (upipe_layer_spec, upipe_te_layer_spec):
        with pytest.raises(UPipeError) as refused:
            build_module(spec, config=alone, layer_number=1, pg_collection=single_rank_groups())
        messages.append(str(refused.value))
    build_module(upipe_layer_spec, config=make_config(Case(), 2, 1), layer_number=1, pg_collection=groups)
    return messages


def test_refused_when_the_layer_is_built(workers):
    messages = workers.run(2, _refused_at_build)[0]
    parts = (
        "--upipe-heads-per-stage 8",
        "--attention-dropout 0.1",
        "(Ulysses) does not fit",
        "--window-size 4 4",
        "--fp8-recipe tensorwise needs multiples of 16, but --hidden-size is 28",
        "--context-parallel-size 1 needs TransformerEngine's linears; use --spec megatron_upipe.layer_specs upipe_te_l",
        "upipe_te_layer_spec needs TransformerEngine: it cannot be imported (No module named",
    )
    for message, part in zip(messages, parts, strict=True):
        assert part in message
