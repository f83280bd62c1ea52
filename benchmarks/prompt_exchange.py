"""Measured peaks without what gloo adds by chance: its threads hold exchanged tensors a little after the exchange."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from megatron_upipe.context.transport import Sending, TorchTransport

PATIENCE_S = 10


@contextmanager
def prompt_exchanges() -> Iterator[None]:
    """Within, who waits for an exchange also waits until nobody but its callers holds what was sent and what came."""
    start = TorchTransport.start

    def started(self: TorchTransport, send: Tensor) -> _Prompt:
        holders = send._use_count()
        return _Prompt(start(self, send), send, holders)

    TorchTransport.start = started
    try:
        yield
    finally:
        TorchTransport.start = start


class _Prompt:
    def __init__(self, sending: Sending, send: Tensor, holders: int) -> None:
        self._sending, self._send, self._holders = sending, send, holders

    def wait(self) -> Tensor:
        received = self._sending.wait()
        deadline = time.monotonic() + PATIENCE_S
        while self._send._use_count() > self._holders or received._use_count() > 1:
            assert time.monotonic() < deadline, "an exchange is over, and its tensors are still held"
            time.sleep(0.0002)
        self._send = None
        return received
