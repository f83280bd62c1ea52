"""What waits for backward: each layer's input and attention output, and how to make again what was not kept.

A ``Waiting`` belongs to one autograd node, that is to one layer in one micro-batch. With ``--upipe-checkpoint-every k``
only every k-th layer keeps its input; the others know the layer before them, and backward runs forward again from the
last kept input.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from torch import Tensor

from megatron_upipe.attention.kept import DeviceAttention, HostAttention, KeptAttention
from megatron_upipe.memory.host_store import READ_TWICE, Fetch, HostStore, Parked


class Steps(Protocol):
    """The two halves of a layer's forward without autograd, and ``run`` between the hooks of the layer's module.

    Collective."""

    def attend(self, x: Tensor) -> DeviceAttention: ...

    def finish(self, x: Tensor, kept: KeptAttention) -> Tensor: ...

    def again(self, run: Callable[[], Tensor], x: Tensor) -> Tensor: ...


class _OnDevice:
    """A tensor that stays where it is, in the place of a ``Parked``."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def start(self) -> Fetch:
        if self._tensor is None:
            raise RuntimeError(READ_TWICE)
        if self._tensor._version != self._version:
            raise RuntimeError("the input of a UPipe layer was modified in place after the layer had read it")
        return Fetch(self._tensor, lambda: None)

    def release(self) -> None:
        self._tensor = None


class Waiting:
    """One layer's share of what waits. ``store`` None: on the device."""

    def __init__(self, steps: Steps, store: HostStore | None) -> None:
        self.steps, self._store = steps, store
        self.previous: Waiting | None = None  # whose forward makes this input again
        self.before: Callable[[], Waiting | None] = lambda: None  # whose backward comes next
        self._x: Parked | _OnDevice | None = None
        self._kept: KeptAttention | None = None
        self._ahead: Fetch | None = None

    def keep_input(self, x: Tensor) -> None:
        self._x = _OnDevice(x.detach()) if self._store is None else self._store.park(x)

    def input_copied(self) -> None:
        """What runs from now on may write to the input."""
        if self._store is not None and self._x is not None:
            self._x.copied()

    def keep_attention(self, kept: DeviceAttention) -> None:
        self._kept = kept if self._store is None else HostAttention(kept, self._store)

    def start_input(self) -> None:
        """Starts to bring the input to the device, ahead of ``input``."""
        if self._ahead is None and self._x is not None:
            self._ahead = self._x.start()

    def prefetch_before(self) -> None:
        """``start_input`` of the layer whose backward comes next."""
        before = self.before()
        if before is not None:
            before.start_input()

    def input(self) -> Tensor:
        """The layer's input on the device. Collective where it has to be made again."""
        if self._x is None:
            self._make_again()
        self.start_input()
        ahead, self._ahead = self._ahead, None
        return ahead.wait()

    def attention(self, x: Tensor) -> KeptAttention:
        """The attention of the input ``x``. Collective where it has to be made again."""
        if self._kept is None:
            self.keep_attention(self.steps.attend(x))
        return self._kept

    def output(self, x: Tensor) -> Tensor:
        """The layer's output from its input ``x``; its attention is kept on the way. Collective."""
        return self.steps.finish(x, self.attention(x))

    def release(self) -> None:
        """Lets go of everything; afterwards ``input`` raises RuntimeError."""
        for held in (self._x, self._kept):
            if held is not None:
                held.release()
        self._ahead = self._kept = self.previous = None

    def _make_again(self) -> None:
        """Runs the layers from the last kept input up to this one; their inputs and attentions are kept on the way."""
        missing = list(self._without_input())
        x = missing[-1].previous.input()
        for waiting in reversed(missing):
            before = waiting.previous
            x = before.steps.again(partial(before.output, x), x)
            waiting.keep_input(x)

    def _without_input(self) -> Iterator[Waiting]:
        waiting = self
        while waiting._x is None:
            if waiting.previous is None:
                raise RuntimeError(READ_TWICE)
            yield waiting
            waiting = waiting.previous


class Chain:
    """Finds out whether a layer's input is the very output of the layer that ran last."""

    def __init__(self) -> None:
        self._last: Callable[[], Waiting | None] = lambda: None  # weak references
        self._output: Callable[[], Tensor | None] = lambda: None
        self._version, self._length = 0, 0

    def ran(self, waiting: Waiting, output: Tensor) -> None:
        """``waiting``'s layer has just made ``output``."""
        self._last, self._output = weakref.ref(waiting), weakref.ref(output)
        self._version = output._version

    def join(self, waiting: Waiting, x: Tensor, every: int) -> bool:
        """Links ``waiting`` to the layer before it if there are fewer than ``every`` since the last kept input."""
        last, output = self._last(), self._output()
        same = last is not None and output is not None and (_place(x), x._version) == (_place(output), self._version)
        if same:
            waiting.before = self._last
        if not same or self._length >= every:
            self._length = 1
            return False
        waiting.previous = last
        self._length += 1
        return True


def _place(tensor: Tensor) -> tuple:
    """Which memory it is; also of tensors without data, in a simulation."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape
