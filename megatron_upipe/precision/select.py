"""Choosing the precision of a layer's products."""

from __future__ import annotations

import torch

from megatron_upipe.errors import UPipeError
from megatron_upipe.precision.plain import PLAIN
from megatron_upipe.precision.protocol import Precision
from megatron_upipe.precision.recipes import Fp8Recipe
from megatron_upipe.precision.te_package import recipes_here, refuses_te
from megatron_upipe.precision.transformer_engine import TransformerEnginePrecision
from megatron_upipe.precision.twin import TwinPrecision


def select_precision(recipe: Fp8Recipe | None, device: torch.device, dtype: torch.dtype) -> Precision:
    """For parameters of ``dtype`` on ``device``: TransformerEngine on a GPU, the twin elsewhere, plain without FP8.

    Raises UPipeError where TransformerEngine or the GPU cannot do it.
    """
    if recipe is None:
        return PLAIN
    if device.type != "cuda":
        return TwinPrecision(recipe)
    if dtype not in (torch.bfloat16, torch.float16):
        raise UPipeError(f"--fp8-format needs parameters in 16 bits, not {dtype}; add --bf16")
    reason = refuses_te()
    if reason is not None:
        raise UPipeError(f"--fp8-format needs TransformerEngine: {reason}")
    reasons = recipes_here()
    if reasons[recipe.name]:
        others = " or ".join(name for name, other in reasons.items() if not other)
        instead = f"use {others}" if others else "leave --fp8-format out"
        raise UPipeError(f"--fp8-recipe {recipe.name} cannot run on this GPU: {reasons[recipe.name]}; {instead}")
    return TransformerEnginePrecision(recipe, dtype, device)
