"""Live bytes of tensors while code runs, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_DEVICE = torch.ops.prim.device.default


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Of an operation's arguments or results; several times as fast as torch's own functions for trees."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations create while the mode is on, and those still alive.

    ``now`` and ``peak`` are bytes. Sees every tensor that torch operations return, in forward and backward; not what a
    kernel allocates and frees inside one call, nor what existed before, nor views of it (add that with ``count``). Per
    thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._alive: dict[int, tuple[Any, int]] = {}  # a weak reference and the bytes counted

    def count(self, *tensors: Tensor) -> None:
        """Counts tensors that were made before the mode was on."""
        for tensor in tensors:
            self._see(tensor, tensor.untyped_storage().nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is _DEVICE:  # half of all calls, where tensors have no data
            return getattr(args[0], "fake_device", None) or func(*args)
        for tensor in tensors_in((args, kwargs or {})):
            self._see(tensor, 0)
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self._see(tensor, tensor.untyped_storage().nbytes())
        if func is torch.ops.inductor.resize_storage_bytes_.default:
            self._resized(args[0].untyped_storage())
        return result

    def _see(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        self._alive[key] = weakref.ref(storage, lambda _, key=key: self._forget(key)), size
        self.now += size
        self.peak = max(self.peak, self.now)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """A storage that was counted gave up memory, or took some."""
        reference, counted = self._alive[storage._cdata]
        if counted:
            self._alive[storage._cdata] = reference, storage.nbytes()
            self.now += storage.nbytes() - counted
            self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        _, counted = self._alive.pop(key)
        self.now -= counted
