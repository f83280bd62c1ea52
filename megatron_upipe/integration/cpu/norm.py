"""Norms that work with sequence parallelism on a CPU.

Megatron's torch norm (``WrappedTorchNorm``, also the final norm of the block) refuses sequence parallelism; the norms
that support it need TransformerEngine or Apex. Torch's own norms do, once their parameters are marked, so that
Megatron sums their gradients over the tensor-parallel group.
"""

from typing import Any

import torch

from megatron_upipe.errors import UPipeError
from megatron_upipe.integration.symbols import Replacement

NORMS = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}


def build_norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> torch.nn.Module:
    """Takes the place of ``WrappedTorchNorm.__new__``: a torch norm over the last ``hidden_size`` values.

    Raises UPipeError for what torch's norms cannot do.
    """
    if config.normalization not in NORMS:
        raise UPipeError(f"--normalization {config.normalization} is not available on a CPU; use RMSNorm or LayerNorm")
    if config.layernorm_zero_centered_gamma:
        raise UPipeError("--apply-layernorm-1p is not available on a CPU; leave it out")
    norm = NORMS[config.normalization](normalized_shape=hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def replacements() -> list[Replacement]:
    return [
        Replacement(
            "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            lambda original: staticmethod(build_norm),
            "the torch norm refuses sequence parallelism",
        )
    ]
