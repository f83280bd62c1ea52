"""``--upipe-metrics FILE``: exact numbers of a run as JSON lines.

Megatron prints six digits, and averages the second iteration of a process with the first. This file has each value as
it was computed, written by the last rank (the one that prints Megatron's iteration lines):

    {"iteration": 7, "lm loss": 3.2519638538360596, "grad norm": 0.91, "seconds": 0.41}
    {"iteration": 10, "validation lm loss": 3.19...}
"""

import inspect
import json
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from megatron_upipe.integration.symbols import Replacement
from megatron_upipe.integration.throughput import log_throughput

# What evaluate() is called for; only its caller knows.
_evaluating: dict[str, Any] = {}


def _file() -> Path | None:
    """Where to write on this rank; None if nothing is to be written."""
    from megatron.training import get_args

    path = get_args().upipe_metrics
    if path is None or torch.distributed.get_rank() != torch.distributed.get_world_size() - 1:
        return None
    return Path(path)


def _append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def _numbers(losses: dict[str, Any], prefix: str = "") -> dict[str, float]:
    return {prefix + name: float(value) for name, value in losses.items()}


def _record_training(original: Callable) -> Callable:
    signature = inspect.signature(original)
    last = time.perf_counter()

    @wraps(original)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        nonlocal last
        path = _file()
        if path is None:
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        now = time.perf_counter()
        record = {"iteration": given["iteration"], **_numbers(given["loss_dict"])}
        if given["grad_norm"] is not None:
            record["grad norm"] = float(given["grad_norm"])
        _append(path, {**record, "seconds": round(now - last, 4)})
        last = now
        return original(*args, **kwargs)

    return training_log


def _record_evaluation(original: Callable) -> Callable:
    signature = inspect.signature(original)

    def evaluate_and_print_results(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        # "iteration 20" during training; "... on validation set", "... on test set" after it
        names = {"on test set": "test", "on validation set": "final validation"}
        name = next((n for ending, n in names.items() if given["prefix"].endswith(ending)), "validation")
        _evaluating.update(iteration=given["iteration"], name=name)
        return original(*args, **kwargs)

    return evaluate_and_print_results


def _record_evaluated(original: Callable) -> Callable:
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        path = _file()
        # the losses are empty or None on ranks without them; scripts may evaluate on their own
        if path is not None and result[0] and _evaluating:
            numbers = _numbers(result[0], f"{_evaluating['name']} ")
            _append(path, {"iteration": _evaluating["iteration"], **numbers})
        return result

    return evaluate


def replacements() -> list[Replacement]:
    why = "writes --upipe-metrics"
    return [
        Replacement(
            "megatron.training.training:training_log",
            lambda original: log_throughput(_record_training(original)),
            f"{why}, and tokens a second with --log-throughput",
        ),
        Replacement("megatron.training.training:evaluate_and_print_results", _record_evaluation, why),
        Replacement("megatron.training.training:evaluate", _record_evaluated, why),
    ]
