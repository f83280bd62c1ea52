"""The second half of a layer, forward and backward: norm, MLP and residual connection of some rows.

A dense MLP is written out here, tile by tile, each weight's gradient summed in fp32 over the tiles. Any other MLP
(mixture of experts) is Megatron's own code on all rows at once, which backward runs again under autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from megatron.core.fusions.fused_bias_geglu import bias_geglu_impl
from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from megatron_upipe.attention.elementwise import ElementwiseGradient, apply_norm
from megatron_upipe.attention.gradients import WeightGradient, flat
from megatron_upipe.attention.linears import ReturnsParameters, parameters_of
from megatron_upipe.context.merge import accumulation_dtype
from megatron_upipe.errors import UPipeError
from megatron_upipe.precision.protocol import Operand, Precision, Weight


class Around(NamedTuple):
    """What an MLP needs from the layer around it; ``gather`` and ``reduce`` as in ``TensorParallel``."""

    precision: Precision
    gather: Callable[[Tensor], Tensor]
    reduce: Callable[[Tensor], Tensor]


def is_dense(mlp: torch.nn.Module) -> bool:
    """Whether the backward below is that of ``mlp``."""
    return type(mlp) is MLP and isinstance(mlp.linear_fc1, ReturnsParameters)


def mlp_parameters(layer: torch.nn.Module) -> list[Tensor]:
    """Parameters of the norm and the MLP, in the order of the gradients that the classes below return."""
    return [*layer.pre_mlp_layernorm.parameters(), *_mlp_parameters(layer.mlp)]


def _mlp_parameters(mlp: torch.nn.Module) -> list[Tensor]:
    if not is_dense(mlp):
        return list(mlp.parameters())
    linears = (parameters_of(mlp.linear_fc1, "linear_fc1"), parameters_of(mlp.linear_fc2, "linear_fc2"))
    return [p for pair in linears for p in pair if p is not None]


def activation(mlp: MLP, intermediate: Tensor, bias: Tensor | None) -> Tensor:
    """What Megatron's MLP does between its linears, [t, b, ffn or 2 ffn] -> [t, b, ffn]."""
    config, function = mlp.config, mlp.activation_func
    if config.bias_activation_fusion and not config.use_te_activation_func:
        if function is torch.nn.functional.silu and config.gated_linear_unit:
            return bias_swiglu_impl(intermediate, bias, config.activation_func_fp8_input_store, False)
        if function is torch.nn.functional.gelu:
            return (bias_geglu_impl if config.gated_linear_unit else bias_gelu_impl)(intermediate, bias)
        raise UPipeError("--bias-activation-fusion knows SwiGLU and GELU only; leave it out")
    if bias is not None:
        intermediate = intermediate + bias
    if config.use_te_activation_func or not config.gated_linear_unit:
        return function(intermediate)
    gate, linear = torch.chunk(intermediate, 2, dim=-1)
    if config.activation_func_clamp_value is not None:
        most = config.activation_func_clamp_value
        gate, linear = gate.clamp(max=most), linear.clamp(min=-most, max=most)
    return config.activation_func(gate) * (linear + config.glu_linear_offset)


class DenseForward:
    """``layer._forward_mlp`` for a dense MLP, in one pass. Collective over the tensor-parallel group."""

    def __init__(self, layer: Any, around: Around) -> None:
        self._layer, self._mlp, self._norm = layer, layer.mlp, layer.pre_mlp_layernorm
        self._around, self._precision = around, around.precision
        w1, self._b1 = parameters_of(self._mlp.linear_fc1, "linear_fc1")
        w2, self._b2 = parameters_of(self._mlp.linear_fc2, "linear_fc2")
        self._w1, self._w2 = Weight(w1, self._precision), Weight(w2, self._precision)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[t, b, hidden] -> the same."""
        intermediate = self._intermediate(hidden, backward=False)[1]
        activated = activation(self._mlp, intermediate, self._b1)
        del intermediate
        x = self._precision.tokens(flat(activated), forward=True, backward=False)
        out = self._precision.product(x, self._w2.rows()).view(*activated.shape[:2], -1)
        del activated, x
        layer = self._layer
        add = layer.mlp_bda(layer.training, layer.config.bias_dropout_fusion)
        return add((self._around.reduce(out), self._b2), hidden, layer.hidden_dropout)

    def _intermediate(self, hidden: Tensor, backward: bool) -> tuple[Operand, Tensor]:
        """What ``linear_fc1`` reads and makes."""
        normed = self._around.gather(apply_norm(self._norm, hidden, None))
        x = self._precision.tokens(flat(normed), forward=True, backward=backward)
        return x, self._precision.product(x, self._w1.rows()).view(*normed.shape[:2], -1)


class DenseBackward(DenseForward):
    """Gradients of it."""

    def __init__(self, layer: Any, around: Around, needs: list[bool], fuse: bool) -> None:
        super().__init__(layer, around)
        norm = list(self._norm.parameters())
        self._dnorm = ElementwiseGradient(norm, needs[: len(norm)])
        parameters = [self._w1.parameter, self._b1, self._w2.parameter, self._b2]
        wanted = iter(needs[len(norm) :])
        self._gradients = [
            WeightGradient(p, fuse, summed=True) if p is not None and next(wanted) else None for p in parameters
        ]
        self._given = [p is not None for p in parameters]

    def tile(self, hidden: Tensor, dy: Tensor) -> Tensor:
        """Gradient of ``hidden`` [t, b, hidden], the MLP's input before its norm, from that of the result; a new
        tensor."""
        dw1, db1, dw2, db2 = self._gradients
        if db2 is not None:
            db2.add(_sum(dy))
        precision = self._precision
        dout = precision.gradient(flat(self._around.gather(dy)), backward=dw2 is not None)
        x, intermediate = self._intermediate(hidden, backward=dw1 is not None)
        intermediate.requires_grad_()
        with torch.enable_grad():
            activated = activation(self._mlp, intermediate, self._b1)
        if dw2 is not None:
            dw2.add_product(precision, dout, precision.tokens(flat(activated.detach()), forward=False, backward=True))
        dactivated = precision.input_gradient(dout, self._w2.rows(backward=True)).view(activated.shape)
        (dintermediate,) = torch.autograd.grad(activated, intermediate, dactivated)
        del activated, intermediate, dout, dactivated
        if db1 is not None:
            db1.add(_sum(dintermediate))
        shape = (*dintermediate.shape[:2], -1)
        dintermediate = precision.gradient(flat(dintermediate), backward=dw1 is not None)
        if dw1 is not None:
            dw1.add_product(precision, dintermediate, x)
        dnormed = precision.input_gradient(dintermediate, self._w1.rows(backward=True)).view(shape)
        dnormed = self._around.reduce(dnormed)
        del dintermediate, x
        return self._dnorm.through(lambda t, p: apply_norm(self._norm, t, p), hidden, dnormed).add_(dy)

    def result(self) -> list[Tensor | None]:
        """Gradients of ``mlp_parameters``."""
        linears = [g and g.result() for g, given in zip(self._gradients, self._given, strict=True) if given]
        return [*self._dnorm.result(), *linears]


class AnyBackward:
    """Gradients of ``layer._forward_mlp`` by autograd, for one tile of all rows."""

    def __init__(self, layer: Any, forward: Callable[[Tensor], Tensor], needs: list[bool]) -> None:
        self._forward, self._parameters = forward, mlp_parameters(layer)
        self._needs, self._gradients = needs, [None] * len(needs)

    def tile(self, hidden: Tensor, dy: Tensor) -> Tensor:
        leaf = hidden.detach().requires_grad_()
        with torch.enable_grad():
            y = self._forward(leaf)
        wanted = [i for i, needed in enumerate(self._needs) if needed]
        parameters = [self._parameters[i] for i in wanted]
        dhidden, *gradients = torch.autograd.grad(y, (leaf, *parameters), dy, allow_unused=True)
        for i, gradient in zip(wanted, gradients, strict=True):
            self._gradients[i] = gradient
        return dhidden

    def result(self) -> list[Tensor | None]:
        return self._gradients


def _sum(tensor: Tensor) -> Tensor:
    """Over all tokens, in fp32."""
    return tensor.sum((0, 1), dtype=accumulation_dtype(tensor.dtype))
