"""The host store: tensors that wait for backward in pinned host memory.

Buffers have the exact size of what they hold: torch's pinned allocator rounds up to powers of two (its setting against
that exists in some versions only), so the store registers plain memory with CUDA itself. They are reused for as long
as the process lives. Copies run on a stream of their own, in order, which is all that keeps a buffer from being
overwritten too early.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_upipe.errors import UPipeError

READ_TWICE = "read after release: backward through the same graph twice is not possible with UPipe"


class Copies(Protocol):
    """How bytes travel. A call starts the copy and returns what is to be called before ``target`` is read, or
    ``source`` written to; ``source`` may be dropped at once."""

    def to_host(self, target: Tensor, source: Tensor) -> Callable[[], None]: ...

    def to_device(self, target: Tensor, source: Tensor) -> Callable[[], None]: ...


class CpuCopies:
    """The "device" is the CPU: copies are done at once."""

    def to_host(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        target.copy_(source)
        return lambda: None

    to_device = to_host


class CudaCopies:
    """On one stream of their own. Not run on a GPU so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def to_host(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        return self._copy(target, source, device_side=source)

    def to_device(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        return self._copy(target, source, device_side=target)

    def _copy(self, target: Tensor, source: Tensor, device_side: Tensor) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        device_side.record_stream(self._stream)  # its memory is not given out again before the copy is done
        done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)


class HostStore:
    """Buffers of one device's process. ``buffers`` and ``bytes`` count all of them, ``in_use`` those that hold data."""

    def __init__(self, copies: Copies, register: Callable[[Tensor], None] = lambda buffer: None) -> None:
        self.copies = copies
        self.buffers = self.bytes = self.in_use = 0
        self._register = register
        self._free: dict[int, list[Tensor]] = {}

    def park(self, tensor: Tensor) -> Parked:
        """Copies ``tensor`` to the host. The result belongs to the caller, who may drop the tensor at once."""
        return Parked(self, tensor)

    def take(self, size: int) -> Tensor:
        """A buffer of ``size`` bytes, for ``Parked``. Raises UPipeError when the host has no memory left."""
        free = self._free.setdefault(size, [])
        buffer = free.pop() if free else self._make(size)
        self.in_use += 1
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back."""
        self._free[buffer.numel()].append(buffer)
        self.in_use -= 1

    def _make(self, size: int) -> Tensor:
        try:
            buffer = torch.empty(size, dtype=torch.uint8)
            self._register(buffer)
        except RuntimeError as error:
            raise UPipeError(
                f"--upipe-offload host: no pinned memory for {size:,} bytes more, after {self.bytes:,} bytes in "
                f"{self.buffers} buffers; use --upipe-checkpoint-every or more nodes ({error})"
            ) from error
        self.buffers += 1
        self.bytes += size
        return buffer


class Fetch:
    """A copy on its way to the device; ``wait`` returns it, owned by the caller."""

    def __init__(self, target: Tensor, wait: Callable[[], None]) -> None:
        self._target, self._wait = target, wait

    def wait(self) -> Tensor:
        self._wait()
        target, self._target = self._target, None
        return target


class Parked:
    """A tensor in the host store, contiguous. Its buffer goes back on ``release``, or when nobody holds it any more."""

    def __init__(self, store: HostStore, tensor: Tensor) -> None:
        self._store, self._device = store, tensor.device
        size = prod(tensor.shape) * tensor.itemsize
        buffer = store.take(size)
        self._host = buffer.view(tensor.dtype).view(tensor.shape)
        self._finalizer = weakref.finalize(self, store.give, buffer)
        self._finalizer.atexit = False
        self.copied = store.copies.to_host(self._host, tensor.detach())
        """To be called before the tensor is written to."""

    def start(self, rows: slice = slice(None)) -> Fetch:
        """Starts to copy these rows of the first axis to the device."""
        if not self._finalizer.alive:
            raise RuntimeError(READ_TWICE)
        source = self._host[rows]
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        return Fetch(target, self._store.copies.to_device(target, source))

    def release(self) -> None:
        """Gives the buffer back; may be called again."""
        self._finalizer()


def fetched_ahead(starts: Sequence[Callable[[], Callable[[], Any]]]) -> Iterator[Any]:
    """Results of fetches in order, the next one always on its way. ``starts[i]()`` starts one and returns its wait."""
    following = starts[0]()
    for start in [*starts[1:], None]:
        current, following = following, start and start()
        yield current()


@lru_cache(maxsize=8)
def host_store(device: torch.device) -> HostStore:
    """The process's store for ``device``."""
    if device.type != "cuda":
        return HostStore(CpuCopies())
    return HostStore(CudaCopies(device), _register_with_cuda)


def _register_with_cuda(buffer: Tensor) -> None:
    """Pins plain memory of exactly this size."""
    if buffer.numel():
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))
