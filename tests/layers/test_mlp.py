"""The backward of a dense MLP against Megatron's module, for every activation."""

import pytest
import torch
from layers.stack import SWIGLU, build
from megatron.core.activations import squared_relu

from megatron_upipe.integration.selftest.parity import Case
from megatron_upipe.layers import transformer_layer
from megatron_upipe.layers.mlp import Around, DenseBackward


def _activations(rank, config):
    """(ours, Megatron's MLP with the same weights): the result of a tile and the gradient of its input."""
    layers, _, _ = build(Case(config=config))
    layer = layers[0].to(torch.float32)
    torch.manual_seed(rank)
    hidden, dy = torch.randn(7, 2, 28), torch.randn(7, 2, 28)
    call = layer.self_attention.call(hidden, None)
    needs = [True] * len(transformer_layer.mlp_parameters(layer))
    backward = DenseBackward(layer, Around(call.plan.precision, call.gather, call.reduce), needs, fuse=False)
    ours = [backward.tile(hidden, dy), *backward.result()]
    leaf = hidden.clone().requires_grad_()
    layer.train()
    layer._forward_mlp(leaf).backward(dy)
    stock = [leaf.grad, *(p.grad for p in transformer_layer.mlp_parameters(layer))]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, stock, strict=True))


ACTIVATIONS = {
    "SwiGLU": SWIGLU,
    "fused SwiGLU": {**SWIGLU, "bias_activation_fusion": True},
    "clamped SwiGLU": dict(**SWIGLU, activation_func_clamp_value=0.3, glu_linear_offset=1.0),
    "GEGLU with biases": dict(
        gated_linear_unit=True,
        activation_func=torch.nn.functional.gelu,
        bias_activation_fusion=False,
        add_bias_linear=True,
    ),
    "fused GEGLU": dict(gated_linear_unit=True, bias_activation_fusion=True),
    "GELU": dict(bias_activation_fusion=False, normalization="LayerNorm"),
    "fused GELU, which is the tanh approximation": dict(bias_activation_fusion=True, add_bias_linear=True),
    "squared ReLU": dict(activation_func=squared_relu, bias_activation_fusion=False),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_megatrons(workers, name):
    for error in workers.run(2, _activations, ACTIVATIONS[name]):
        assert error < 1e-5
