"""Live bytes of tensors while code runs, on any device."""

from __future__ import annotations

import weakref
from typing import Any

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
        self._alive: dict[int, Any] = {}

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
        return result

    def _see(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        self._alive[key] = weakref.ref(storage, lambda _, key=key, size=size: self._forget(key, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int, size: int) -> None:
        del self._alive[key]
        self.now -= size
