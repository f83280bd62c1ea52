"""Choosing the block-attention kernel."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from megatron_upipe.errors import UPipeError
from megatron_upipe.kernels.conventions import capability
from megatron_upipe.kernels.flash_attn_2 import FlashAttn2Kernel
from megatron_upipe.kernels.flash_attn_3 import FlashAttn3Kernel
from megatron_upipe.kernels.flash_attn_4 import FlashAttn4Kernel
from megatron_upipe.kernels.fp8_twin import Fp8TwinForward, Fp8TwinMxfp8
from megatron_upipe.kernels.protocol import Kernel
from megatron_upipe.kernels.reference import ReferenceKernel
from megatron_upipe.kernels.te_fp8 import TransformerEngineFp8Forward, TransformerEngineMxfp8
from megatron_upipe.kernels.te_fused import TransformerEngineKernel
from megatron_upipe.kernels.torch_cpu import TorchCpuKernel
from megatron_upipe.kernels.torch_cudnn import TorchCudnnKernel
from megatron_upipe.kernels.torch_flash import TorchFlashKernel

# In the order in which ``auto`` tries them: the fastest first, by their authors' figures.
KERNELS: tuple[Kernel, ...] = (
    FlashAttn3Kernel(),
    FlashAttn4Kernel(),
    TransformerEngineKernel(),
    FlashAttn2Kernel(),
    TorchFlashKernel(),
    TorchCudnnKernel(),
    TorchCpuKernel(),
    ReferenceKernel(),
)
AUTO = "auto"


def select_kernel(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    name: str = AUTO,
    deterministic: bool = False,
    window: bool = False,
) -> Kernel:
    """The kernel called ``name``, or the fastest that serves such inputs, with a ``window`` if need be.

    ``deterministic``: gradients repeat bit for bit where the backend has a switch for it. Raises UPipeError, with the
    reasons, if none serves.
    """
    candidates = [kernel for kernel in KERNELS if name in (AUTO, kernel.name)]
    if not candidates:
        known = ", ".join(kernel.name for kernel in KERNELS)
        raise UPipeError(f"--upipe-attention-backend {name} does not exist; choose auto, {known}")
    reasons = []
    for kernel in candidates:
        reason = _refusal(kernel, device, dtype, head_dim, window)
        if reason is None:
            return _switched(kernel, deterministic)
        reasons.append(f"{kernel.name}: {reason}")
    what = f"{dtype} on {device} with head size {head_dim}"
    if name == AUTO:
        raise UPipeError(f"no attention kernel serves {what} ({'; '.join(reasons)})")
    raise UPipeError(
        f"--upipe-attention-backend {name} does not serve {what}: {reasons[0]}; auto chooses one that does"
    )


def _refusal(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int, window: bool) -> str | None:
    if window and not kernel.windows:
        return "has no sliding window (--window-size)"
    return kernel.refuses(device, dtype, head_dim)


def _switched(kernel: Kernel, deterministic: bool) -> Kernel:
    switch = any(field.name == "deterministic" for field in fields(kernel))
    return replace(kernel, deterministic=deterministic) if switch else kernel


def fp8_kernel(
    mode: str, base: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool = False
) -> Kernel:
    """``base`` with forward, or everything, in FP8, as ``--upipe-fp8-attention`` says; the twin where no GPU is.

    Raises UPipeError where the GPU or TransformerEngine cannot do it.
    """
    if mode == "off":
        return base
    if device.type != "cuda":
        return Fp8TwinForward(base) if mode == "forward" else Fp8TwinMxfp8()
    kernel = TransformerEngineFp8Forward(base) if mode == "forward" else TransformerEngineMxfp8()
    reason = kernel.refuses(device, dtype, head_dim)
    if reason is None:
        return _switched(kernel, deterministic)
    nearest = {9: "forward", 10: "full", 11: "full"}.get(capability(device)[0], "off")
    instead = f"{nearest}, or off" if nearest not in (mode, "off") else "off"
    raise UPipeError(
        f"--upipe-fp8-attention {mode} does not serve {dtype} on {device} with head size {head_dim}: {reason}; use "
        f"{instead}"
    )


def passed_over(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int, window: bool = False
) -> list[str]:
    """Why ``auto`` did not take the kernels before ``kernel``, one line each."""
    names = [other.name for other in KERNELS]
    faster = KERNELS[: names.index(kernel.name)]
    return [f"{other.name}: {_refusal(other, device, dtype, head_dim, window)}" for other in faster]
