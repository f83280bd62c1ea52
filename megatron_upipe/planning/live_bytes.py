"""Live bytes of tensors while code runs, on any device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._see(leaf, 0)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf, leaf.untyped_storage().nbytes())
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
