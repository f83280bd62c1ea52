"""Choosing the block-attention kernel."""

from __future__ import annotations

import torch

from megatron_upipe.errors import UPipeError
from megatron_upipe.kernels.protocol import Kernel
from megatron_upipe.kernels.reference import ReferenceKernel
from megatron_upipe.kernels.torch_cpu import TorchCpuKernel

# Fastest first.
KERNELS: tuple[Kernel, ...] = (TorchCpuKernel(), ReferenceKernel())


def select_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """The fastest kernel that serves such inputs. Raises UPipeError, with each one's reason, if none does."""
    reasons = []
    for kernel in KERNELS:
        reason = kernel.refuses(device, dtype, head_dim)
        if reason is None:
            return kernel
        reasons.append(f"{kernel.name}: {reason}")
    raise UPipeError(f"no attention kernel serves {dtype} on {device} with head size {head_dim} ({'; '.join(reasons)})")
