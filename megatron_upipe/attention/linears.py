"""Megatron's linears whose parameters UPipe multiplies by itself."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import _grad_accum_fusion_available as HAVE_FUSED_WGRAD
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_upipe.errors import UPipeError


class ReturnsParameters:
    """Called without input, a linear returns its weight and bias.

    UPipe multiplies by pieces of the weight itself, but reads it through the module's call: DDP and FSDP gather
    parameters in hooks of that call.
    """

    def forward(self, input_: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if input_ is None:
            return self.weight, given(self.bias)
        return super().forward(input_, *args, **kwargs)


class _FusesWithoutApex(ReturnsParameters):
    """Gradient accumulation fusion needs Apex in Megatron's linears only; UPipe adds to ``main_grad`` without it."""

    def __init__(self, *args: Any, config: TransformerConfig, **kwargs: Any) -> None:
        unfused = copy.copy(config)
        unfused.gradient_accumulation_fusion = config.gradient_accumulation_fusion and HAVE_FUSED_WGRAD
        super().__init__(*args, config=unfused, **kwargs)
        self.config = config


class UPipeColumnParallelLinear(_FusesWithoutApex, ColumnParallelLinear):
    """``linear_qkv`` and ``linear_fc1``."""


class UPipeRowParallelLinear(_FusesWithoutApex, RowParallelLinear):
    """``linear_proj`` and ``linear_fc2``."""


def given(bias: Tensor | None) -> Tensor | None:
    """``bias`` as None where there is none: TransformerEngine's linears then hold an empty tensor."""
    return None if bias is None or bias.numel() == 0 else bias


def parameters_of(linear: Any, name: str) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of one of the linears above, through its call. UPipeError if that would bypass anything."""
    hooks = (
        not isinstance(linear, ReturnsParameters)
        or linear._forward_hooks
        or linear._backward_hooks
        or linear._backward_pre_hooks
    )
    if hooks or linear.weight.grad_fn is not None:
        raise UPipeError(
            f"{name} is wrapped, hooked or its weight is computed ({type(linear).__name__}); UPipe reads the "
            "weight itself and would bypass that; use the stock spec for it"
        )
    return linear()
