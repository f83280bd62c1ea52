"""The exchange by the GPUs' copy engines, with the optional package fast-ulysses: no SM is taken from attention.

It works within a node of up to 8 GPUs joined by NVLink. Its own re-ordering of tokens and heads is not used, for it
knows no zigzag: an exchange is an all-to-all of flat rows. Not run on a GPU so far.

Source: triple-mu/fast-ulysses 0.2.1, ``UlyssesGroup``.
"""

from __future__ import annotations

import socket
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_upipe.context.transport import Sending, TorchTransport, Transport
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
        return received.reshape(self._shape)  # the package has copied it out of its windows


def refuses(size: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the package cannot serve a Ulysses group of ``size`` ranks; None if it may."""
    if device.type != "cuda":
        return f"it needs GPUs, not {device.type}"
    if size > MOST_RANKS:
        return f"it serves up to {MOST_RANKS} ranks, not {size}"
    if dtype not in DTYPES:
        return f"it does not move {dtype}"
    if find_spec(PACKAGE) is None:
        return "it is not installed (docs/attention.md says which build)"
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
    transport: Transport | None = None

    def make() -> None:
        nonlocal transport
        transport = FastUlysses(group, device)

    for attempt in (
        lambda: refuses(group.size(), device, dtype),
        lambda: _several_nodes(group),
        make,
        lambda: _fault(transport, group, device, dtype),
    ):
        try:
            reason = attempt()
        except Exception as error:  # the others wait for what this rank says
            reason = f"{type(error).__name__}: {error}"
        reason = _first_of(group, reason)
        if reason is not None:
            return None, reason
    return transport, None


def _several_nodes(group: dist.ProcessGroup) -> str | None:
    """The package itself compares numbers of GPUs, which are the same on every node."""
    hosts: list[str | None] = [None] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    nodes = len(set(hosts))
    return None if nodes == 1 else f"it serves one node, and the Ulysses group is on {nodes}"


def _fault(transport: Transport, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> str | None:
    """One exchange beside torch's: its windows are made with the first one."""
    p, rank = group.size(), group.rank()
    send = torch.arange(p * 24, device=device).view(p, 24).add(rank).to(dtype)
    wanted = TorchTransport(group).start(send).wait()
    found = transport.start(send).wait()
    return None if torch.equal(found, wanted) else "it brings other bytes than torch.distributed"


def _first_of(group: dist.ProcessGroup, reason: str | None) -> str | None:
    """The first that any rank has."""
    reasons: list[str | None] = [None] * group.size()
    dist.all_gather_object(reasons, reason, group=group)
    return next((one for one in reasons if one is not None), None)
