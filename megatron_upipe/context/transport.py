"""How the bytes of an exchange travel within the Ulysses group, beside what is computed meanwhile.

A transport starts an exchange on the stream of its communicator, behind everything that the current stream was given
so far; whoever waits makes the current stream wait for it, not the host (with gloo the host). Until then both buffers
are held, so that the allocator gives neither of them out again; afterwards the next stage gets the same memory.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Sending(Protocol):
    """An exchange on its way."""

    def wait(self) -> Tensor:
        """What came, owned by the caller. To be called once."""
        ...


class Transport(Protocol):
    """Of one Ulysses group of ``size`` ranks."""

    name: str
    size: int

    def start(self, send: Tensor) -> Sending:
        """Sends row r of the contiguous ``[P, ...]`` to rank r; row r of what comes is from rank r. Collective."""
        ...


class TorchTransport:
    """torch.distributed: NCCL, or gloo on CPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.size, self.name = group, group.size(), dist.get_backend(group)

    def start(self, send: Tensor) -> Sending:
        received = torch.empty_like(send)
        work = dist.all_to_all_single(received, send, group=self._group, async_op=True)
        return _TorchSending(work, send, received)


class _TorchSending:
    def __init__(self, work: dist.Work, send: Tensor, received: Tensor) -> None:
        self._work, self._send, self._received = work, send, received

    def wait(self) -> Tensor:
        if self._work is None:
            raise RuntimeError("wait called twice on the same exchange")
        self._work.wait()
        received = self._received
        self._work = self._send = self._received = None
        return received
