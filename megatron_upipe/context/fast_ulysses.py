"""The exchange by the GPUs' copy engines, with the optional package fast-ulysses: no SM is taken from attention.

It works within a node of up to 8 GPUs joined by NVLink. Its own re-ordering of tokens and heads is not used, for it
knows no zigzag: an exchange is an all-to-all of flat rows. Not run on a GPU so far.

Source: triple-mu/fast-ulysses 0.2.1, ``UlyssesGroup``.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_upipe.context.transport import Sending, Transport
from megatron_upipe.errors import UPipeError

NAME, PACKAGE, MOST_RANKS, ALIGNMENT = "fast-ulysses", "fast_ulysses", 8, 16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class FastUlysses:
    """Of one group; making it is collective. Raises RuntimeError where not all GPUs are joined by NVLink."""

    name = NAME

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.size = group.size()
        self._ulysses = import_module(PACKAGE).UlyssesGroup(group, device)

    def start(self, send: Tensor) -> Sending:
        p, row = self.size, send[0].numel()
        # rows that are not whole units of what it copies travel with some bytes more
        unit = ALIGNMENT // send.itemsize
        rows = send.view(p, row)
        padded = -(-row // unit) * unit
        if padded != row:
            rows = torch.nn.functional.pad(rows, (0, padded - row))
        # [b = 1, tokens = 1, heads = P, d]: heads are scattered, tokens gathered
        coming = self._ulysses.all_to_all_4d_async(rows.view(1, 1, p, padded), mode=0)
        return _FastSending(coming, rows, send.shape, row)


class _FastSending:
    def __init__(self, coming: Any, sent: Tensor, shape: torch.Size, row: int) -> None:
        self._coming, self._sent, self._shape, self._row = coming, sent, shape, row

    def wait(self) -> Tensor:
        received = self._coming.wait().view(self._shape[0], -1)[:, : self._row]
        self._coming = self._sent = None
        return received.reshape(self._shape).clone()  # its windows are written to again


def refuses(size: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the package cannot serve a Ulysses group of ``size`` ranks; None if it may."""
    if device.type != "cuda":
        return f"it needs GPUs, not {device.type}"
    if size > MOST_RANKS:
        return f"it serves up to {MOST_RANKS} ranks, not {size}"
    if dtype not in DTYPES:
        return f"it does not move {dtype}"
    if find_spec(PACKAGE) is None:
        return "it is not installed"
    return None


def copy_engines(
    exchange: str, group: dist.ProcessGroup | None, device: torch.device, dtype: torch.dtype
) -> Transport | None:
    """The transport for ``--upipe-exchange``; None is torch.distributed. Collective over the group.

    Raises UPipeError where fast-ulysses is asked for and cannot serve; ``auto`` then goes without.
    """
    if exchange == "nccl" or group is None:
        return None
    key = group, device, dtype
    if key not in _decided:
        _decided[key] = _decide(group, device, dtype)
        transport, reason = _decided[key]
        if transport is None and exchange == "auto" and dist.get_rank() == 0:
            print(f"megatron_upipe: --upipe-exchange auto is {dist.get_backend(group)}: {reason}", flush=True)
    transport, reason = _decided[key]
    if transport is None and exchange == NAME:
        raise UPipeError(f"--upipe-exchange {NAME}: {reason}; use nccl")
    return transport


# one for all layers: each holds windows in the memory of the GPU
_decided: dict[tuple, tuple[Transport | None, str | None]] = {}


def _decide(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> tuple[Transport | None, str | None]:
    """A transport, or None and why; the same on all ranks of the group, whatever one of them lacks."""
    reason = _first_of(group, refuses(group.size(), device, dtype))
    transport = None
    if reason is None:
        try:
            transport = FastUlysses(group, device)
        except (RuntimeError, ImportError) as error:
            reason = str(error)
        reason = _first_of(group, reason)
    return (None, reason) if reason is not None else (transport, None)


def _first_of(group: dist.ProcessGroup, reason: str | None) -> str | None:
    """The first that any rank has."""
    reasons: list[str | None] = [None] * group.size()
    dist.all_gather_object(reasons, reason, group=group)
    return next((one for one in reasons if one is not None), None)
