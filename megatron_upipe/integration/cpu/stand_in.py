"""Installing and uninstalling the CPU stand-in."""

import os

import torch

from megatron_upipe.errors import UPipeError
from megatron_upipe.integration.cpu import adam, cuda_api, norm, tensors
from megatron_upipe.integration.symbols import Replacement, registry

OWNER = "CPU stand-in"
NOTICE = "megatron_upipe: CPU stand-in on: Megatron runs on gloo without a GPU (for trying out, tests and simulation)"


def is_installed() -> bool:
    return OWNER in registry.owners()


def install() -> None:
    """Lets Megatron run in this process without a GPU, and says so in one line (rank 0). Not collective.

    Raises UPipeError when a GPU is in use or a symbol is already replaced; then nothing is changed.
    """
    if is_installed():
        raise UPipeError("the CPU stand-in is already installed; uninstall it first")
    if torch.cuda.is_initialized():
        raise UPipeError("the CPU stand-in cannot be installed: this process already uses a GPU; leave out --upipe-cpu")
    # Megatron decorates functions with torch.compile at import; compiling for a CPU costs more than it gives here.
    torch._dynamo.config.disable = True
    registry.install(OWNER, _replacements())
    if int(os.environ.get("RANK", "0")) == 0:
        print(NOTICE, flush=True)


def uninstall() -> None:
    """Restores every replaced symbol."""
    registry.undo(OWNER)
    torch._dynamo.config.disable = os.environ.get("TORCHDYNAMO_DISABLE") == "1"


def _replacements() -> list[Replacement]:
    why = "Megatron defers this until CUDA is initialised, which never happens on a CPU"
    return [
        *cuda_api.replacements(),
        *tensors.replacements(),
        # bound by name at import, so replaced where it is used
        Replacement(
            "megatron.core.tensor_parallel.random:_lazy_call", lambda original: lambda call, **kwargs: call(), why
        ),
        *norm.replacements(),
        *adam.replacements(),
    ]
