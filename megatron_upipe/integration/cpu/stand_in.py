"""Installing and uninstalling the CPU stand-in."""

import os
from collections.abc import Callable
from typing import Any

import torch

from megatron_upipe.errors import UPipeError
from megatron_upipe.integration.cpu import adam, cuda_api, fsdp, hybrid, norm, packed, tensors
from megatron_upipe.integration.symbols import Replacement, for_this_megatron, registry

OWNER = "CPU stand-in"
NOTICE = "megatron_upipe: CPU stand-in on: Megatron runs on gloo without a GPU (for trying out, tests and simulation)"

_dynamo_was_disabled = False


def is_installed() -> bool:
    return OWNER in registry.owners()


def install(quiet: bool = False) -> None:
    """Lets Megatron run in this process without a GPU, and says so in one line (rank 0, unless ``quiet``).

    Not collective.

    Raises UPipeError when a GPU is in use or a symbol is already replaced; then nothing is changed.
    """
    if is_installed():
        raise UPipeError("the CPU stand-in is already installed; uninstall it first")
    if torch.cuda.is_initialized():
        raise UPipeError("the CPU stand-in cannot be installed: this process already uses a GPU; leave out --upipe-cpu")
    # `with torch.device(...)` remembers torch's factories at its first use, which must not be the replaced ones
    torch.utils._device._device_constructors()
    registry.install(OWNER, for_this_megatron(_replacements()))
    global _dynamo_was_disabled
    _dynamo_was_disabled = torch._dynamo.config.disable
    # Megatron decorates functions with torch.compile; compiling them for a CPU costs more than it gives here.
    torch._dynamo.config.disable = True
    if not quiet and int(os.environ.get("RANK", "0")) == 0:
        print(NOTICE, flush=True)


def uninstall() -> None:
    """Restores every replaced symbol."""
    registry.undo(OWNER)
    torch._dynamo.config.disable = _dynamo_was_disabled


def _keeping_rng(original: Callable) -> Callable:
    def build_train_valid_test_data_iterators(*args: Any, **kwargs: Any) -> Any:
        state = torch.get_rng_state()
        result = original(*args, **kwargs)
        torch.set_rng_state(state)
        return result

    return build_train_valid_test_data_iterators


def _replacements() -> list[Replacement]:
    why = "Megatron defers this until CUDA is initialised, which never happens on a CPU"
    return [
        *cuda_api.replacements(),
        *tensors.replacements(),
        # bound by name at import, so replaced where it is used
        Replacement(
            "megatron.core.tensor_parallel.random:_lazy_call", lambda original: lambda call, **kwargs: call(), why
        ),
        Replacement(
            "megatron.training.training:build_train_valid_test_data_iterators",
            _keeping_rng,
            "data loaders draw from the generator that dropout uses on a CPU; a resumed run must not see that",
        ),
        *norm.replacements(),
        *adam.replacements(),
        *fsdp.replacements(),
        *packed.replacements(),
        *hybrid.replacements(),
    ]
