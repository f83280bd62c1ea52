"""The plug-in's flags in Megatron's own parser, and what changes there."""

import argparse
import difflib
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from megatron_upipe.config import EXCHANGES, FP8_ATTENTION_MODES, OVERLAP_MODES, PREFETCH_MODES, ROPE_MODES, STORES
from megatron_upipe.errors import UPipeError
from megatron_upipe.integration import cpu
from megatron_upipe.integration.argument_checks import check_upipe, hybrid_pattern
from megatron_upipe.integration.symbols import Replacement
from megatron_upipe.integration.upipe_spec import SPEC, wants_upipe
from megatron_upipe.kernels.select import AUTO, KERNELS

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
    "gradient_reduce_div_fusion": False,
}


# (attribute of the arguments, values that work on the CPU stand-in, flag, what to do)
CPU_LIMITS = (
    ("distributed_backend", ("gloo",), "--distributed-backend", "it is gloo"),
    ("transformer_impl", ("local",), "--transformer-impl", "it is local"),
    ("fp4", (), "--fp4-format", "leave it out"),
    ("use_precision_aware_optimizer", (), "--use-precision-aware-optimizer", "leave it out"),
    ("cuda_graph_impl", ("none",), "--cuda-graph-impl", "it is none"),
    ("attention_backend", ("auto", "unfused", "local"), "--attention-backend", "leave it out"),
    ("multi_latent_attention", (), "--multi-latent-attention", "leave it out"),
    ("use_torch_fsdp2", (), "--use-torch-fsdp2", "use --use-distributed-optimizer"),
)


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
        "--upipe-heads-per-stage",
        type=int,
        metavar="U",
        help="query heads of a stage over the Ulysses group: P (the default) makes the smallest, all heads of a "
        "tensor-parallel rank is plain Ulysses; P and R come from --hierarchical-context-parallel-sizes",
    )
    group.add_argument(
        "--upipe-attention-backend",
        choices=(AUTO, *(kernel.name for kernel in KERNELS)),
        help="what computes a block of attention: auto (the default) takes the fastest that is installed and serves "
        "the inputs",
    )
    group.add_argument(
        "--upipe-fp8-attention",
        choices=FP8_ATTENTION_MODES,
        help="with --fp8-format, whose recipe UPipe's products follow, attention too: off (in 16 bits, the default), "
        "forward (its forward in FP8, on Hopper) or full (backward as well, MXFP8 on Blackwell); docs/precision.md",
    )
    group.add_argument(
        "--upipe-overlap",
        choices=("auto", *OVERLAP_MODES),
        help="exchange the next stage's heads, and the last one's result, while a stage attends, which costs another "
        "stage's tensors: auto (the default) does so where the simulated peak fits the GPU",
    )
    group.add_argument(
        "--upipe-exchange",
        choices=EXCHANGES,
        help="what carries the exchange: nccl (the default; on CPUs gloo), fast-ulysses (the GPUs' copy engines over "
        "NVLink, a package of its own), or auto, that where it is installed and serves",
    )
    group.add_argument(
        "--upipe-rope",
        choices=ROPE_MODES,
        help="RoPE angles: stock (Megatron's fp32 table, the default below 128K tokens) or exact (fp64, the default "
        "from 128K on)",
    )
    group.add_argument(
        "--upipe-keep-attention",
        metavar="{0..layers|all}",
        help="layers, of the whole model, that keep their attention output for backward (default all); the others "
        "compute attention a second time there, as the paper does",
    )
    group.add_argument(
        "--upipe-offload",
        choices=STORES,
        help="where layer inputs and kept attention wait for backward: none, on the device (the default), or host, in "
        "pinned host memory",
    )
    group.add_argument(
        "--upipe-prefetch",
        choices=PREFETCH_MODES,
        help="with --upipe-offload host, fetch a layer's input one layer ahead, which costs its size once more on the "
        "device: auto (the default) does so where the device has room",
    )
    group.add_argument(
        "--upipe-checkpoint-every",
        type=_whole_number(least=1),
        metavar="K",
        help="keep the input of every K-th layer only (default 1) and run forward again from there; for when even the "
        "layer inputs do not fit",
    )
    group.add_argument(
        "--upipe-mlp-tile-tokens",
        type=_whole_number(least=1),
        metavar="N",
        help="tokens that go through the MLP at a time, forward and backward (default 4096)",
    )
    group.add_argument(
        "--upipe-loss-tile-tokens",
        type=_whole_number(least=0),
        metavar="N",
        help="tokens whose logits exist at a time (default 1024); 0 is Megatron's own loss, all logits at once",
    )
    group.add_argument(
        "--upipe-metrics",
        metavar="FILE",
        help="append each iteration's exact losses, gradient norm and seconds to FILE as JSON lines",
    )
    return parser


def _whole_number(least: int) -> Callable[[str], int]:
    def parse(given: str) -> int:
        if not given.removeprefix("-").isdecimal():
            raise argparse.ArgumentTypeError(f"{given} is not a whole number; the least is {least}")
        return int(given)

    return parse


def _with_upipe_flags(original: Callable) -> Callable:
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add_upipe_flags(original(parser))
        parser.error = lambda message: _refuse(parser, message)
        _mend_help(parser)
        if cpu.is_installed():
            parser.set_defaults(**CPU_DEFAULTS)
        return parser

    return add_megatron_arguments


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """A bare % in one help text of Megatron's makes argparse fail on all of them."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        try:
            if action.help:
                formatter._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = action.help.replace("%", "%%")


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
    _check_spec(args)
    _check_metrics(args.upipe_metrics)
    if (
        cpu.is_installed()
        and args.fp8
        and not (wants_upipe(args) and args.context_parallel_size > 1 and not args.num_experts)
    ):
        raise UPipeError(
            f"--fp8-format {args.fp8} needs TransformerEngine and a GPU here; on a CPU UPipe's own layers have a twin "
            "of it in plain torch, with --context-parallel-size above 1 and without experts"
        )
    check_upipe(args)
    if not cpu.is_installed():
        return
    for attribute, allowed, flag, instead in CPU_LIMITS:
        value = getattr(args, attribute, None)
        value = getattr(value, "name", value)  # enums
        if value not in (*allowed, None, False):
            shown = flag if value is True else f"{flag} {value}"
            raise UPipeError(f"{shown} needs a GPU; on a CPU {instead}")
    missing = set(hybrid_pattern(args) or "") - set("*-E|/")
    if missing:
        raise UPipeError(
            f"--hybrid-layer-pattern {hybrid_pattern(args)}: layers {''.join(sorted(missing))} need a GPU; on a CPU "
            "there are * (attention), - (MLP) and E (experts)"
        )
    if "layernorm" in (args.recompute_modules or []):
        raise UPipeError("--recompute-modules layernorm needs TransformerEngine; leave layernorm out on a CPU")
    if args.expert_model_parallel_size > 1 and args.moe_token_dispatcher_type == "alltoall":
        raise UPipeError("--moe-token-dispatcher-type alltoall needs a GPU; on a CPU use allgather")
    if args.context_parallel_size > 1 and not wants_upipe(args):
        raise UPipeError(
            f"--context-parallel-size {args.context_parallel_size} with Megatron's own attention needs a GPU "
            f"(TransformerEngine); on a CPU add --spec {SPEC} upipe_layer_spec"
        )


def _check_spec(args: argparse.Namespace) -> None:
    """Megatron swallows an ImportError of the --spec module and trains the stock model."""
    if not args.spec:
        return
    shown = "--spec " + " ".join(args.spec)
    if len(args.spec) != 2:
        raise UPipeError(f"{shown}: two words are needed, a module and the name of a spec in it")
    try:
        module = importlib.import_module(args.spec[0])
    except ImportError as error:
        raise UPipeError(f"{shown}: the module cannot be imported: {error}") from error
    if not hasattr(module, args.spec[1]):
        raise UPipeError(f"{shown}: the module has no {args.spec[1]}")


def _check_metrics(path: str | None) -> None:
    if path is not None and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
        raise UPipeError(f"--upipe-metrics {path} is not a file in an existing folder; name one")


def replacements() -> list[Replacement]:
    return [
        Replacement(
            "megatron.training.arguments:add_megatron_arguments", _with_upipe_flags, "adds the plug-in's flags"
        ),
        Replacement("megatron.training.arguments:validate_args", _check_first, "checks the plug-in's flags first"),
    ]
