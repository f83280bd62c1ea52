"""``torch.cuda`` as Megatron sees it on a machine without a GPU: one device named "cpu", idle streams, host memory."""

import os
import resource
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from megatron_upipe.integration.cpu.callers import called_by_megatron, for_megatron
from megatron_upipe.integration.symbols import Replacement

CPU = torch.device("cpu")
# Reported to Megatron as the device's compute capability. Below 10 it wants CUDA_DEVICE_MAX_CONNECTIONS=1 with TP or
# CP, as on Hopper, so that the flags tried here are those that a Hopper run needs.
CAPABILITY = (9, 0)


class IdleStream:
    """A CUDA stream that has always finished: work on a CPU is done when the call returns."""

    cuda_stream = 0
    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else IdleEvent()

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class IdleEvent:
    """A CUDA event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class OneGenerator:
    """The CPU's generator, whatever device is asked for."""

    def __getitem__(self, device: Any) -> torch.Generator:
        return torch.default_generator


_STREAM = IdleStream()


def _class_for_megatron(idle: type) -> Any:
    """Megatron constructs ``idle``; others construct, and subclass checks see, the original class."""

    def make(original: type) -> type:
        class Meta(type(original)):
            def __call__(cls, *args: Any, **kwargs: Any) -> Any:
                if called_by_megatron():
                    return idle(*args, **kwargs)
                return original(*args, **kwargs)

            def __instancecheck__(cls, instance: Any) -> bool:
                return isinstance(instance, (idle, original))

        return Meta(original.__name__, (original,), {"__doc__": original.__doc__, "__module__": original.__module__})

    return make


def _peak_host_bytes(device: Any = None) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _host_bytes(device: Any = None) -> int:
    return psutil.Process().memory_info().rss


def _memory_stats(device: Any = None) -> dict[str, int]:
    now, peak = _host_bytes(), _peak_host_bytes()
    stats = {"num_ooms": 0, "num_alloc_retries": 0}
    for pool in ("allocated_bytes", "active_bytes", "reserved_bytes", "requested_bytes", "inactive_split_bytes"):
        stats |= {f"{pool}.all.current": now, f"{pool}.all.peak": peak, f"{pool}.all.allocated": now}
    return stats | {"allocation.all.current": 0, "allocation.all.allocated": 0, "allocation.all.freed": 0}


def _device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="cpu (stand-in)",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=psutil.virtual_memory().total,
        multi_processor_count=os.cpu_count(),
    )


@contextmanager
def _nothing(*args: Any, **kwargs: Any):
    yield


def _set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


# function of torch.cuda -> what Megatron gets
ANSWERS = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    "set_device": lambda device: None,
    "current_device": lambda: CPU,
    "device": lambda device=None: nullcontext(),
    "synchronize": lambda device=None: None,
    "get_device_name": lambda device=None: "cpu (stand-in)",
    "get_device_capability": lambda device=None: CAPABILITY,
    "get_device_properties": _device_properties,
    # streams
    "stream": lambda stream: nullcontext(),
    "current_stream": lambda device=None: _STREAM,
    "default_stream": lambda device=None: _STREAM,
    "set_stream": lambda stream: None,
    "is_current_stream_capturing": lambda: False,
    # memory: the host's, for the whole process
    "empty_cache": lambda: None,
    "memory_allocated": _host_bytes,
    "max_memory_allocated": _peak_host_bytes,
    "memory_reserved": _host_bytes,
    "max_memory_reserved": _peak_host_bytes,
    "device_memory_used": _host_bytes,
    "reset_peak_memory_stats": lambda device=None: None,
    "memory_stats": _memory_stats,
    # random numbers: Megatron's per-rank "CUDA" generators are states of the one CPU generator
    "manual_seed": torch.manual_seed,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": _set_rng_state,
    "random.get_rng_state": lambda device=None: torch.get_rng_state(),
    "nvtx.range_push": lambda message: 0,
    "nvtx.range_pop": lambda: 0,
    "nvtx.range": _nothing,
}


def replacements() -> list[Replacement]:
    """Replacements of ``torch.cuda``'s functions, classes and default generator."""
    why = "Megatron asks torch.cuda; the stand-in answers for the CPU"
    functions = [Replacement(f"torch.cuda:{n}", for_megatron(a), why, missing_ok=True) for n, a in ANSWERS.items()]
    return [
        *functions,
        Replacement("torch.cuda:Stream", _class_for_megatron(IdleStream), why),
        Replacement("torch.cuda:Event", _class_for_megatron(IdleEvent), why),
        # torch itself reads this only after CUDA was initialised, which the stand-in excludes
        Replacement("torch.cuda:default_generators", lambda original: OneGenerator(), why),
    ]
