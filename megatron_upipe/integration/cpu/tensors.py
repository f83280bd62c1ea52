"""Tensor methods and factory functions that name a CUDA device or pinned memory, as Megatron calls them."""

from functools import wraps
from typing import Any

import torch

from megatron_upipe.integration.cpu.callers import called_by_megatron, for_megatron
from megatron_upipe.integration.symbols import Replacement

# Factories that Megatron calls with device="cuda" or pin_memory=True.
FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "full",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)


def names_cuda(device: Any) -> bool:
    """Whether ``device`` (string, torch.device, index or None) is a CUDA device."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _factory(original: Any) -> Any:
    @wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if kwargs and called_by_megatron():
            if names_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return replaced


def _to(original: Any) -> Any:
    @wraps(original)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        if called_by_megatron():
            args = tuple("cpu" if names_cuda(a) else a for a in args)
            if names_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
        return original(self, *args, **kwargs)

    return replaced


def _type(original: Any) -> Any:
    """``Tensor.type()`` names the CUDA type: Megatron's optimizers sort parameters by these strings."""

    @wraps(original)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        if not args and not kwargs and called_by_megatron():
            return found.replace("torch.", "torch.cuda.", 1)
        return found

    return replaced


def replacements() -> list[Replacement]:
    """Replacements of torch's factories and of ``Tensor`` and ``Module`` methods."""
    why = "Megatron names a CUDA device or pinned memory; the stand-in uses the CPU's"
    stay = for_megatron(lambda self, *args, **kwargs: self)
    return [
        *(Replacement(f"torch:{name}", _factory, why) for name in FACTORIES),
        Replacement("torch:Tensor.cuda", stay, why),
        Replacement("torch:Tensor.pin_memory", stay, why),
        Replacement("torch:Tensor.to", _to, why),
        Replacement("torch:Tensor.type", _type, why),
        Replacement("torch.nn:Module.cuda", stay, why),
        Replacement("torch.nn:Module.to", _to, why),
    ]
