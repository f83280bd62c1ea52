"""Bandwidth of the exchange and of the ring, as UPipe uses them."""

from __future__ import annotations

import statistics
import time

import torch

from megatron_upipe.context.exchange import start_to_heads, start_to_sequence
from megatron_upipe.context.groups import ContextGroups
from megatron_upipe.context.ring import Transfer
from megatron_upipe.context.transport import TorchTransport

REPEATS = 7


def _median_seconds(call, device: torch.device) -> float:
    times = []
    for _ in range(REPEATS + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def measure(groups: ContextGroups, device: torch.device, mebibytes: int) -> dict[str, float]:
    """GB/s that this rank sends, for tensors of ``mebibytes`` in bf16; copies before and after included. Collective."""
    p = groups.layout.ulysses_size
    found = {}
    elements = mebibytes * 2**20 // 2
    if groups.ulysses is not None:
        head_dim = 64
        tokens = elements // (p * head_dim) // 2 * 2
        shard = torch.randn(tokens, 1, p, head_dim, device=device).bfloat16()
        transport = TorchTransport(groups.ulysses)

        def there_and_back() -> None:
            start_to_sequence(start_to_heads([shard], transport)(), transport)()

        seconds = _median_seconds(there_and_back, device)
        found["exchange"] = 2 * shard.nbytes * (p - 1) / p / seconds / 1e9
    if groups.ring is not None:
        block = torch.randn(elements, device=device).bfloat16()
        came, size = torch.empty_like(block), groups.ring.size()
        before, behind = (groups.ring_rank - 1) % size, (groups.ring_rank + 1) % size
        seconds = _median_seconds(lambda: Transfer(groups.ring, 0, [block], behind, [came], before).wait(), device)
        found["ring"] = block.nbytes / seconds / 1e9
    return found
