"""Megatron's start-up steps that break or waste memory, neutralised on GPUs and CPUs alike."""

import subprocess
import sysconfig
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from megatron_upipe.errors import UPipeError
from megatron_upipe.integration.symbols import Replacement

HELPERS = "megatron.core.datasets.helpers_cpp"


def _no_warm_up(original: Callable) -> Callable:
    def warm_up(tp_size: int | None = None) -> None:
        """Replaces the warm-up of fused functions on a full-length activation."""

    return warm_up


def _compile_helpers_if_missing(original: Callable) -> Callable:
    def compile_helpers() -> None:
        """Builds Megatron's dataset helpers in a checkout that has none; called on one rank."""
        if find_spec(HELPERS) is not None:
            return
        folder = Path(import_module("megatron.core.datasets").__file__).parent
        if not (folder / "Makefile").exists():
            raise UPipeError(f"{HELPERS} is missing and {folder} has no Makefile to build it; reinstall megatron-core")
        # Megatron's Makefile asks whatever `python3` is first on PATH and needs pybind11; name this interpreter's
        # file ending and headers, and the copy of pybind11 that torch brings, instead.
        includes = [sysconfig.get_path("include"), str(Path(torch.__file__).parent / "include")]
        command = [
            "make",
            "-C",
            str(folder),
            f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}",
            "CPPFLAGS=" + " ".join(f"-I{path}" for path in includes),
        ]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode != 0:
            raise UPipeError(f"building {HELPERS} failed: {' '.join(command)}\n{built.stderr}")

    return compile_helpers


def replacements() -> list[Replacement]:
    return [
        Replacement(
            "megatron.training.initialize:_warmup_jit_function",
            _no_warm_up,
            "allocates a full-length MLP activation (14 GiB at 8M tokens on 16 GPUs) only to throw it away",
        ),
        Replacement(
            "megatron.core.datasets.utils:compile_helpers",
            _compile_helpers_if_missing,
            "runs a Makefile that the wheel does not contain, and exits when that fails",
        ),
        Replacement(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
            torch.no_grad(),
            "loading fp32 parameters copies into a view of a leaf that requires grad, which torch refuses",
        ),
    ]
