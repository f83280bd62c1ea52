"""What the GPU backends share: devices and sizes they serve, tokens before heads, lse of rows without keys."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from megatron_upipe.kernels.protocol import Documents
from megatron_upipe.precision.te_package import BROKEN

HALF = (torch.bfloat16, torch.float16)


def refuses_on_gpu(
    device: torch.device, dtype: torch.dtype, head_dim: int, architectures: range, most: int = 256, multiple: int = 8
) -> str | None:
    """Why a CUDA backend for 16-bit inputs cannot serve such inputs. ``architectures``: major compute capabilities."""
    if device.type != "cuda":
        return "needs CUDA tensors"
    if dtype not in HALF:
        return f"{dtype} is not supported; it takes bf16 and fp16"
    if head_dim % multiple or head_dim > most:
        return f"head size {head_dim} is not supported; it takes multiples of {multiple} up to {most}"
    major, minor = capability(device)
    if major not in architectures:
        return f"compute capability {major}.{minor} is not supported"
    return None


def capability(device: torch.device) -> tuple[int, int]:
    """Major and minor compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


def imported(module: str, *names: str) -> list[Callable] | str:
    """Functions of an optional package, or why they cannot be had."""
    try:
        found = import_module(module)
    except BROKEN as error:
        return f"{module} cannot be imported ({error})"
    missing = [name for name in names if not hasattr(found, name)]
    return f"{module} has no {missing[0]}" if missing else [getattr(found, name) for name in names]


def tokens_first(*tensors: Tensor) -> list[Tensor]:
    """Views [b, n, l, d] -> [b, l, n, d], or back."""
    return [t.transpose(1, 2) for t in tensors]


def to_package(documents: Documents | None, *tensors: Tensor) -> list[Tensor]:
    """Views [b, n, l, d] -> [b, l, n, d], of packed documents [l, n, d]."""
    return [t if documents is None else t.squeeze(0) for t in tokens_first(*tensors)]


def from_package(documents: Documents | None, *tensors: Tensor) -> list[Tensor]:
    """The reverse."""
    return tokens_first(*(t if documents is None else t.unsqueeze(0) for t in tensors))


def window_sizes(causal: bool, left: int | None) -> dict[str, int]:
    """As flash-attn has them: -1 is unlimited."""
    if left is None:
        return dict(window_size_left=-1, window_size_right=-1)
    return dict(window_size_left=left, window_size_right=0 if causal else -1)


def minus_infinity_without_keys(lse: Tensor) -> Tensor:
    """flash-attn gives rows without keys +inf."""
    return lse.masked_fill(lse == torch.inf, -torch.inf)


def fp32_dq_bytes(batch: int, heads: int, tokens: int, head_dim: int) -> int:
    """The fp32 dq that flash-attn's backward kernels add up in; tokens are rounded up to blocks of 128."""
    return batch * heads * -(-tokens // 128) * 128 * head_dim * 4
