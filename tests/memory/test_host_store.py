"""The host store by itself: order of copies, reuse, exact sizes, nothing left in use."""

import gc
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_upipe.errors import UPipeError
from megatron_upipe.memory.host_store import CpuCopies, CudaCopies, HostStore, fetched_ahead


class LateCopies:
    """Copies as late as a stream may run them: each when something waits for it or for a later one, in order."""

    def __init__(self):
        self.queue = []

    def to_host(self, target, source):
        return self._late(target, source)

    def to_device(self, target, source):
        target.fill_(torch.nan)
        return self._late(target, source)

    def _late(self, target, source):
        self.queue.append((target, source))
        mine = len(self.queue)
        done = []

        def wait():
            if not done:
                while self.queue:
                    later, earlier = self.queue.pop(0)
                    later.copy_(earlier)
                done.append(mine)

        return wait


@pytest.mark.parametrize("copies", [CpuCopies, LateCopies])
def test_what_is_parked_comes_back(copies):
    store = HostStore(copies())
    tensors = [torch.randn(7, 3), torch.randn(5, dtype=torch.float64), torch.randn(4, 2, 3).bfloat16()]
    parked = [store.park(t) for t in tensors]
    for _ in range(2):  # as often as one likes
        assert all(torch.equal(p.start().wait(), t) for p, t in zip(parked, tensors, strict=True))
    assert torch.equal(parked[0].start(slice(2, 5)).wait(), tensors[0][2:5])
    assert (store.buffers, store.in_use, store.bytes) == (3, 3, 84 + 40 + 48)


def test_a_tensor_may_be_written_to_when_its_copy_is_done():
    store, tensor = HostStore(LateCopies()), torch.ones(3)
    parked = store.park(tensor)
    parked.copied()
    tensor.zero_()
    assert torch.equal(parked.start().wait(), torch.ones(3))


@pytest.mark.parametrize("copies", [CpuCopies, LateCopies])
def test_a_view_is_parked_whole_and_contiguous(copies):
    store, whole = HostStore(copies()), torch.randn(6, 4)
    parked = store.park(whole.t()[1:3])
    assert store.bytes == 2 * 6 * 4 and torch.equal(parked.start().wait(), whole.t()[1:3])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["park", "read", "release", "drop"]), st.integers(0, 5)), max_size=40))
def test_any_order_of_use_with_late_copies(steps):
    """A buffer is reused while its last copy may still be on the way; contents never mix."""
    store, held, number = HostStore(LateCopies()), {}, 0
    for action, slot in steps:
        if action == "park":
            number += 1
            held[slot] = (store.park(torch.full((4,), float(number))), float(number))
        elif slot in held:
            parked, value = held[slot]
            if action == "read":
                assert parked.start().wait().tolist() == [value] * 4
            elif action == "release":
                parked.release()
                held.pop(slot)
            else:
                held.pop(slot)
            del parked
    assert store.in_use == len(held) and store.buffers <= 6
    held.clear()
    assert store.in_use == 0


def test_buffers_are_reused_and_given_back_once():
    store = HostStore(CpuCopies())
    for _ in range(5):
        parked = store.park(torch.ones(8))
        parked.release()
        parked.release()
        assert (store.buffers, store.in_use) == (1, 0)
        with pytest.raises(RuntimeError, match="backward through the same graph twice"):
            parked.start()
    del parked
    gc.collect()
    assert store.in_use == 0


def test_registration_and_its_failure():
    sizes = []
    store = HostStore(CpuCopies(), register=lambda buffer: sizes.append(buffer.numel()))
    store.park(torch.ones(5)).release()
    assert sizes == [20], "exact, not a power of two"

    def fails(buffer):
        raise RuntimeError("out of memory")

    with pytest.raises(UPipeError, match="no pinned memory for 20 bytes more, after 0 bytes in 0 buffers"):
        HostStore(CpuCopies(), register=fails).park(torch.ones(5))


def test_the_next_fetch_is_on_its_way():
    events = []

    def start(i):
        events.append(f"start {i}")
        return lambda: events.append(f"wait {i}") or i

    assert list(fetched_ahead([lambda i=i: start(i) for i in range(3)])) == [0, 1, 2]
    assert events == ["start 0", "start 1", "wait 0", "start 2", "wait 1", "wait 2"]


class FakeStream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        self.log.append(f"event on {self.name}")
        return "event"

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for the {event}")


def test_order_of_copies_on_streams(monkeypatch):
    """What CUDA is told, on stand-ins with the names of torch's real methods."""
    log = []
    assert all(hasattr(torch.cuda.Stream, name) for name in ("wait_stream", "record_event", "wait_event"))
    main = FakeStream(log, "main")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(log, "copies"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(log.append(f"on {stream.name}")))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: log.append(f"kept for {stream.name}"))
    store, tensor = HostStore(CudaCopies(torch.device("cpu"))), torch.arange(3.0)
    parked = store.park(tensor)
    assert log == ["copies waits for main", "on copies", "kept for copies", "event on copies"]
    log.clear()
    parked.copied()
    assert log == ["main waits for the event"]
    log.clear()
    fetch = parked.start()
    assert log == ["copies waits for main", "on copies", "kept for copies", "event on copies"]
    log.clear()
    assert torch.equal(fetch.wait(), tensor) and log == ["main waits for the event"]
