"""With Megatron's ``--log-throughput``: tokens a second and GPU, and the share of the card's peak (MFU), in the log.

FLOPs are Megatron's own count, which is right at any length: attention's half under the causal mask, by document where
documents are packed (those of the line's own iteration), nothing for recomputation. It knows no ``--window-size``: with
that no MFU is printed. Times are those since the last line, without evaluation and checkpoints, and not averaged with
the first iteration as Megatron's are.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

# TFLOP/s in bf16 without sparsity, by part of the card's name; of the makers' data sheets
PEAKS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "GH200": 989.0,
    "A100": 312.0,
    "B200": 2250.0,
    "GB200": 2500.0,
}


def peak_tflops(card: str) -> float | None:
    """None for a card that is not known here."""
    found = [name for name in PEAKS if name in card]
    return PEAKS[max(found, key=len)] if found else None


def throughput_line(
    iteration: int, tokens: float, flops: float | None, seconds: float, gpus: int, peak: float | None
) -> str:
    """Of one iteration with so many ``tokens`` and ``flops`` on all ``gpus``, which took ``seconds``."""
    line = f"iteration {iteration}: {tokens / seconds / gpus:,.1f} tokens/s/GPU"
    if flops is None:
        return line
    rate = flops / seconds / gpus / 1e12
    line += f", {rate:,.1f} model TFLOP/s/GPU"
    return line if peak is None else f"{line}, MFU {rate / peak:.1%} of bf16"


class _Clock:
    """When the last line was, and after which iteration."""

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None

    def seconds(self, trained: float, iteration: int) -> float | None:
        """Of an iteration since the last call, after so many seconds of training in all; None the first time, which has
        the start-up in it."""
        now, last = (trained, iteration), self._last
        self._last = now
        return None if last is None or iteration <= last[1] else (now[0] - last[0]) / (iteration - last[1])


_clock = _Clock()


def log_throughput(original: Callable) -> Callable:
    """Around Megatron's ``training_log``."""
    signature = inspect.signature(original)

    @wraps(original)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args, get_timers

        result = original(*args, **kwargs)
        settings = get_args()
        given = signature.bind(*args, **kwargs).arguments
        iteration = given["iteration"]
        first = given.get("is_first_iteration", False)
        if not settings.log_throughput or (iteration % settings.log_interval and not first):
            return result
        seconds = _clock.seconds(get_timers()("interval-time").active_time(), iteration)
        if seconds is not None and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            _print(settings, given, seconds)
        return result

    return training_log


def _print(settings: Namespace, given: dict[str, Any], seconds: float) -> None:
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training.training import num_floating_point_operations

    batch = settings.micro_batch_size * settings.data_parallel_size * get_num_microbatches()
    squares, tokens = (given.get(f"{name}_in_batch") for name in ("seqlen_squared_sum", "total_real_tokens"))
    flops = None if settings.window_size else num_floating_point_operations(settings, batch, squares, tokens)
    peak = peak_tflops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    tokens = tokens or batch * settings.seq_length
    line = throughput_line(given["iteration"], tokens, flops, seconds, settings.world_size, peak)
    print(f"megatron_upipe: {line}", flush=True)
