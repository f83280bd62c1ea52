"""Live bytes with their owners: which code made what is alive, on the device and on the host, and what was sent."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from megatron_upipe.planning.live_bytes import LiveBytes, tensors_in

# c10d operation -> which of its arguments is sent, the factor on its bytes that leave a rank of n, and for what; the
# others wait or carry nothing
RECEIVED = "received"  # around the ring, where a rank does not receive what it sends
_SENT: dict[str, tuple[int, Callable[[int], float], str]] = {
    "alltoall_base_": (1, lambda n: (n - 1) / n, "exchange"),
    "send": (0, lambda n: 1, "ring"),
    "recv_": (0, lambda n: 1, RECEIVED),
    "allreduce_": (0, lambda n: 2 * (n - 1) / n, "tensor parallel"),
    "_allgather_base_": (1, lambda n: n - 1, "tensor parallel"),
    "_reduce_scatter_base_": (1, lambda n: (n - 1) / n, "tensor parallel"),
}


_FLOPS = flop_registry | {torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm]}


Calls = tuple[tuple[str, int], ...]
"""Functions of this package and Megatron with their lines, the innermost first."""
Maker = tuple[str, Calls]
"""Phase, and what made something."""


class Ledger(LiveBytes):
    """``owners`` are bytes by owner; ``peaks`` the largest sums of them when something was made, by ``phase`` (which
    others set) and the calls that led there; ``at_peaks`` what they were then. A storage's owner is the innermost
    function of this package or Megatron that made it, as ``folder/file.function``; "autograd" where torch's own
    backward did.

    Buffers of the host store are left out; the store counts them itself. ``sent`` and ``collectives`` count what this
    rank sends, by kind; ``copied`` bytes "to host" and "to device"; ``gemm_flops`` of matrix products by phase.
    ``timeline`` has bytes after every operation that changed them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.owners: Counter[str] = Counter()
        self.phase = ""
        self.peaks: Counter[Maker] = Counter()
        self.at_peaks: dict[Maker, dict[str, int]] = {}
        self.copied: Counter[str] = Counter()
        self.gemm_flops: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        self.timeline: list[int] = []
        self._owner_of: dict[int, str] = {}
        self._on_host: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        before = self.now
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "c10d":
            self._count(func._schema.name.removeprefix("c10d::"), args)
        flops = _FLOPS.get(func._overloadpacket)
        if flops is not None:
            self.gemm_flops[self.phase] += flops(*args, **(kwargs or {}), out_val=result)
        elif func is torch.ops.aten.copy_.default:
            self._count_copy(*args[:2])
        if self.now != before:
            self.timeline.append(self.now)
        return result

    def _count(self, name: str, args: tuple) -> None:
        if name not in _SENT:
            return
        argument, share, kind = _SENT[name]
        groups = (arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()))
        ranks = dist.ProcessGroup.unbox(next(groups)).size()
        self.sent[kind] += sum(t.nbytes for t in tensors_in(args[argument])) * share(ranks)
        self.collectives[kind] += 1

    def _count_copy(self, target: Tensor, source: Tensor) -> None:
        to_host, from_host = (t.untyped_storage()._cdata in self._on_host for t in (target, source))
        if to_host != from_host:
            self.copied["to host" if to_host else "to device"] += target.nbytes

    def _see(self, tensor: Tensor, size: int) -> None:
        key = tensor.untyped_storage()._cdata
        if key in self._alive or not size:
            super()._see(tensor, size)
            return
        owner, calls = _maker()
        if owner == HOST_BUFFER:
            super()._see(tensor, 0)
            self._on_host.add(key)
            return
        super()._see(tensor, size)
        self._owner_of[key] = owner
        self.owners[owner] += size
        maker = self.phase, calls
        if self.now > self.peaks[maker]:
            self.peaks[maker] = self.now
            self.at_peaks[maker] = dict(self.owners)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        before = self.now
        super()._resized(storage)
        owner = self._owner_of.get(storage._cdata)
        if owner is not None:
            self.owners[owner] += self.now - before

    def _forget(self, key: int) -> None:
        _, counted = self._alive[key]
        super()._forget(key)
        self._on_host.discard(key)
        owner = self._owner_of.pop(key, None)
        if owner is not None:
            self.owners[owner] -= counted


HOST_BUFFER = "memory/host_store._make"
_PLANNING = str(Path(__file__).parent)
_WRAPPERS = str(Path(__file__).parents[1] / "integration" / "cpu")


def _maker() -> tuple[str, Calls]:
    """The owner of what is being made, and the calls that led there."""
    frame = sys._getframe(3)
    owner, calls = None, []
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if path.startswith(_PLANNING) and name == "run_step":
            break  # torch's backward calls nothing in Python here
        if "megatron" in path and not path.startswith((_PLANNING, _WRAPPERS)):
            if owner is None:
                file = Path(path)
                owner = f"{file.parent.name}/{file.stem}.{name}"
            calls.append((name, frame.f_lineno))
        frame = frame.f_back
    return owner or "autograd", tuple(calls)
