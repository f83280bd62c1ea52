"""bf16: errors against fp64 at most twice those of the stock layer in bf16, and not growing with stages or tiles."""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module

from megatron_upipe.context.layout import SequenceLayout
from megatron_upipe.integration.selftest.parity import (
    Case,
    _randomise,
    finalized,
    initialize,
    inputs,
    local,
    make_config,
    single_rank_groups,
)
from megatron_upipe.layer_specs import upipe_layer_spec
from megatron_upipe.layers.loss import LossCall, TiledLossFunction
from megatron_upipe.layers.tiles import Tiles

P = 2
TOKENS = 64  # of a rank
MODELS = {
    "SwiGLU": dict(gated_linear_unit=True, activation_func=torch.nn.functional.silu, bias_activation_fusion=False),
    "GELU with biases": dict(normalization="LayerNorm", add_bias_linear=True, bias_activation_fusion=False),
}


def _layers(case):
    """(stock on the whole sequence, ours), same weights, which bf16 holds exactly."""
    spec = get_gpt_layer_local_spec(normalization=make_config(case, 1, 1).normalization)
    torch.manual_seed(3)
    stock = build_module(
        spec, config=make_config(case, 1, 1, ffn_hidden_size=96), layer_number=1, pg_collection=single_rank_groups()
    ).double()
    _randomise(stock)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.copy_(parameter.bfloat16())
    ours = build_module(
        upipe_layer_spec,
        config=make_config(case, P, 1, ffn_hidden_size=96),
        layer_number=1,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    ).double()
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def _errors(rank, case):
    """name -> (error of ours, error of stock), in the 2-norm against stock in fp64."""
    initialize(P, 1)
    layout, rank = SequenceLayout(P, 1), parallel_state.get_context_parallel_rank()
    stock, ours = _layers(case)
    x, dy, table = inputs(case, layout, torch.bfloat16)
    found = []
    for layer, dtype in (
        (stock, torch.float64),
        (ours, torch.float64),
        (stock, torch.bfloat16),
        (ours, torch.bfloat16),
    ):
        layer.to(dtype).zero_grad(set_to_none=True)
        sharded = layer is ours

        def pick(t, sharded=sharded):
            return local(t, layout, rank) if sharded else t

        leaf = pick(x).to(dtype, copy=True).requires_grad_()
        y = layer(leaf, None, rotary_pos_emb=pick(table))[0]
        y.backward(pick(dy).to(dtype))
        results = {"output": y.detach().double(), "dx": leaf.grad.double()}
        if not sharded:
            results = {name: local(t, layout, rank) for name, t in results.items()}
        for name, parameter in layer.named_parameters():
            gradient = parameter.grad.bfloat16() if sharded else parameter.grad
            results[name] = finalized(name, gradient) if sharded else gradient.double()
        found.append(results)
    wanted, *others = found
    errors = {}
    for name, w in wanted.items():
        # each rank's gradient leaves it in bf16, whatever the context parallelism: stock pays for that, too
        rounding, plain, mine = (((other[name] - w).norm() / w.norm()).item() for other in others)
        errors[name] = (mine, plain if name in ("output", "dx") else plain + rounding)
    return errors


def case(model, heads, heads_per_stage, tile_tokens):
    return Case(
        heads,
        heads // 4,
        heads_per_stage,
        micro_batch=2,
        chunk=TOKENS // 2,
        head_dim=8,
        hidden=64,
        config=MODELS[model],
        upipe=dict(mlp_tile_tokens=tile_tokens),
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("heads", "stages"), [(16, 8), (64, 32)])
def test_twice_the_stock_error_at_most(workers, model, heads, stages):
    """In tiles of one token and of all; the error of many is that of one."""
    one, many = (workers.run(P, _errors, case(model, heads, heads // stages, tile_tokens)) for tile_tokens in (4096, 2))
    for errors in (*one, *many):
        assert len(errors) >= 8
        for name, (ours, stock) in errors.items():
            assert 0 < ours <= 2 * stock, (name, ours, stock)
    for whole, tiled in zip(one, many, strict=True):
        for name, (error, _) in tiled.items():
            assert error <= 1.2 * whole[name][0], (name, error, whole[name])


def test_error_does_not_grow_with_stages(workers):
    few, many = (workers.run(P, _errors, case("SwiGLU", 64, u, 16)) for u in (64, 2))
    for whole, staged in zip(few, many, strict=True):
        for name, (error, _) in staged.items():
            assert error <= 1.2 * whole[name][0], (name, error, whole[name])


def _loss(hidden, weight, labels, dlosses, tile):
    """losses, dhidden, dweight; ``tile`` None is the plain implementation with all logits at once."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    if tile is None:
        logits = (hidden @ weight.t()).to(torch.promote_types(hidden.dtype, torch.float32))
        losses = torch.nn.functional.cross_entropy(logits.permute(1, 2, 0), labels.t(), reduction="none").t()
    else:
        call = LossCall(
            Tiles.of(*hidden.shape[:1], tile, hidden.shape[1]),
            lambda rows: rows @ weight.detach().t(),
            lambda: weight,
            lambda t: t,
            lambda t: t,
            None,
            0,
            1.0,
            False,
        )
        losses = TiledLossFunction.apply(True, call, hidden, labels, weight)
    losses.backward(dlosses.to(losses.dtype))
    return [t.double() for t in (losses.detach(), hidden.grad, weight.grad)]


def test_loss():
    torch.manual_seed(0)
    hidden, weight = torch.randn(200, 2, 32).bfloat16(), (torch.randn(120, 32) / 4).bfloat16()
    labels = torch.randint(120, (200, 2))
    dlosses = torch.rand(200, 2) * (torch.rand(200, 2) > 0.3)
    wanted = _loss(hidden.double(), weight.double(), labels, dlosses, None)
    plain, one, many = (_loss(hidden, weight, labels, dlosses, tile) for tile in (None, 4096, 2))
    for w, p, o, m in zip(wanted, plain, one, many, strict=True):
        stock, whole, tiled = ((t - w).norm() / w.norm() for t in (p, o, m))
        assert 0 < whole <= 2 * stock and 0 < tiled <= 1.2 * whole
