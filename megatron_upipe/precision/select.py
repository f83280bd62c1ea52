"""Choosing the precision of a layer's products."""

from __future__ import annotations

from importlib import import_module

import torch

from megatron_upipe.errors import UPipeError
from megatron_upipe.precision.plain import PLAIN
from megatron_upipe.precision.protocol import Precision
from megatron_upipe.precision.recipes import Fp8Recipe
from megatron_upipe.precision.transformer_engine import INSTALL, TransformerEnginePrecision
from megatron_upipe.precision.twin import TwinPrecision

# --fp8-recipe -> major compute capabilities that have it
_ARCHITECTURES = {"tensorwise": range(9, 13), "blockwise": range(9, 10), "mxfp8": range(10, 12)}


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
    major, minor = torch.cuda.get_device_capability(device)
    if major not in _ARCHITECTURES[recipe.name]:
        others = [name for name, majors in _ARCHITECTURES.items() if major in majors]
        instead = f"use {' or '.join(others)}" if others else "leave --fp8-format out"
        raise UPipeError(
            f"--fp8-recipe {recipe.name} is not supported on compute capability {major}.{minor}; {instead}"
        )
    try:
        import_module("transformer_engine.pytorch")
    except ImportError as error:
        raise UPipeError(f"--fp8-format needs TransformerEngine ({error}); {INSTALL}") from error
    return TransformerEnginePrecision(recipe, dtype, device)
