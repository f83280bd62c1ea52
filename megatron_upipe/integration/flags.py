"""The plug-in's flags in Megatron's own parser, and what changes there."""

import argparse
import difflib
import re
from collections.abc import Callable
from typing import Any, NoReturn

from megatron_upipe.errors import UPipeError
from megatron_upipe.integration import cpu
from megatron_upipe.integration.symbols import Replacement

# Megatron's defaults need a GPU; on the CPU stand-in these take their place. Flags given by the user still win.
CPU_DEFAULTS = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "no_persist_layer_norm": True,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "disable_jit_fuser": True,
    "num_workers": 0,
}


def add_upipe_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the plug-in's flag group to ``parser`` and returns it."""
    group = parser.add_argument_group(
        title="megatron_upipe",
        description="UPipe context parallelism. Switch it on with --spec megatron_upipe.layer_specs upipe_layer_spec.",
    )
    group.add_argument(
        "--upipe-cpu",
        action="store_true",
        help="run on the CPU stand-in (gloo) even if a GPU is present; without a GPU this is on by itself",
    )
    group.add_argument(
        "--upipe-metrics",
        metavar="FILE",
        help="append each iteration's exact losses, gradient norm and seconds to FILE as JSON lines",
    )
    return parser


def _with_upipe_flags(original: Callable) -> Callable:
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add_upipe_flags(original(parser))
        parser.error = lambda message: _refuse(parser, message)
        if cpu.is_installed():
            parser.set_defaults(**CPU_DEFAULTS)
        return parser

    return add_megatron_arguments


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """argparse's error without the usage text of a thousand flags, with the nearest flag that exists."""
    known = [option for action in parser._actions for option in action.option_strings]
    unknown = re.findall(r"--[^\s=]+", message) if message.startswith("unrecognized arguments") else []
    hints = []
    for flag in unknown:
        near = difflib.get_close_matches(flag, known, n=1)
        hints.append(f"unknown flag {flag}" + (f"; the nearest known one is {near[0]}" if near else ""))
    raise UPipeError("; ".join(hints) or message)


def _check_first(original: Callable) -> Callable:
    def validate_args(args: Any, defaults: dict | None = None) -> Any:
        check_flags(args)
        return original(args, defaults if defaults is not None else {})

    return validate_args


def check_flags(args: argparse.Namespace) -> None:
    """Refuses, before anything is built, flags that cannot be honoured. Raises UPipeError."""
    if not cpu.is_installed():
        return
    if args.distributed_backend != "gloo":
        raise UPipeError(f"--distributed-backend {args.distributed_backend} needs a GPU; on a CPU it is gloo")
    if args.transformer_impl != "local":
        raise UPipeError(f"--transformer-impl {args.transformer_impl} needs a GPU; on a CPU it is local")
    if args.fp8 is not None:
        raise UPipeError(f"--fp8-format {args.fp8} needs a GPU; leave it out on a CPU")


def replacements() -> list[Replacement]:
    return [
        Replacement(
            "megatron.training.arguments:add_megatron_arguments", _with_upipe_flags, "adds the plug-in's flags"
        ),
        Replacement("megatron.training.arguments:validate_args", _check_first, "checks the plug-in's flags first"),
    ]
