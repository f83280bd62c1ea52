"""The FP8 recipes that UPipe knows, by Megatron's names, and the sizes that they need. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_upipe.errors import UPipeError

# --fp8-recipe -> tokens and features of every product must be multiples of this
ALIGNMENT = {"tensorwise": 16, "blockwise": 128, "mxfp8": 32}

_REFUSED = {
    "delayed": "takes its scales from earlier calls, and UPipe calls a layer's products a stage at a time",
    "custom": "may leave gradients out that TransformerEngine should add to main_grad",
}


@dataclass(frozen=True)
class Fp8Recipe:
    """``hybrid``: gradients in E5M2, all else in E4M3; without it everything in E4M3."""

    name: str
    hybrid: bool

    @property
    def alignment(self) -> int:
        return ALIGNMENT[self.name]

    def describe(self) -> str:
        return f"FP8 {self.name} ({'hybrid' if self.hybrid else 'e4m3'})"


def fp8_recipe(config: Any) -> Fp8Recipe | None:
    """Of Megatron's arguments or TransformerConfig; None without FP8. Raises UPipeError for recipes not supported."""
    if not getattr(config, "fp8", None):
        return None
    name = str(getattr(config.fp8_recipe, "value", config.fp8_recipe))
    if name not in ALIGNMENT:
        reason = _REFUSED.get(name, "is not known")
        shown = f"{name} (Megatron's default)" if name == "delayed" else name
        raise UPipeError(f"--fp8-recipe {shown} is not supported by UPipe: it {reason}; use {' or '.join(ALIGNMENT)}")
    return Fp8Recipe(name, config.fp8 == "hybrid")


def layer_recipe(config: Any, layer_number: int) -> Fp8Recipe | None:
    """The recipe of a layer, counted from 1: none for Megatron's first and last layers in bf16."""
    recipe = fp8_recipe(config)
    if recipe is None or not config.first_last_layers_bf16:
        return recipe
    first, last = config.num_layers_at_start_in_bf16, config.num_layers - config.num_layers_at_end_in_bf16
    return recipe if first < layer_number <= last else None


def check_alignment(recipe: Fp8Recipe, sizes: dict[str, int]) -> None:
    """Raises UPipeError unless each size, named by its flag or meaning, is a multiple of the recipe's alignment."""
    unit = recipe.alignment
    for what, size in sizes.items():
        if size % unit:
            below, above = size // unit * unit, (size // unit + 1) * unit
            nearest = below if below and size - below <= above - size else above
            raise UPipeError(
                f"--fp8-recipe {recipe.name} needs multiples of {unit}, but {what} is {size}; the nearest is {nearest}"
            )
