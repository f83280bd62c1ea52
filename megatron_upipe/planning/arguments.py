"""Flags that ``megatron-upipe simulate`` and ``plan`` share: the model, the GPUs, and the configuration."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, fields
from typing import Any

from megatron_upipe.config import PACKED_LAYOUTS
from megatron_upipe.errors import UPipeError
from megatron_upipe.planning.models import PRESETS, find_model
from megatron_upipe.planning.scenario import Scenario, parse_tokens
from megatron_upipe.planning.states import GIB, SHARDINGS

RESERVE_GIB = 6.0  # CUDA context, NCCL, fragmentation

# flag, field of Scenario, further arguments of add_argument
_CONFIGURATION: list[tuple[str, str, dict[str, Any]]] = [
    ("--ulysses", "ulysses", dict(type=int, metavar="P", help="Ulysses ranks; default: what --ring leaves")),
    ("--ring", "ring", dict(type=int, metavar="R", help="ring ranks")),
    ("--heads-per-stage", "heads_per_stage", dict(type=int, metavar="U", help="of upipe; default P")),
    ("--keep-attention", "keep_attention", dict(metavar="N", help="layers that keep their attention, or all")),
    ("--offload", "offload", dict(choices=("none", "host"), help="where inputs and kept attention wait")),
    ("--prefetch", "prefetch", dict(choices=("on", "off"), help="of layer inputs, with --offload host")),
    ("--overlap", "overlap", dict(choices=("on", "off"), help="of exchanges and attention")),
    ("--checkpoint-every", "checkpoint_every", dict(type=int, metavar="K", help="layers for each kept input")),
    ("--mlp-tile-tokens", "mlp_tile_tokens", dict(type=int, metavar="N", help="tokens through the MLP at a time")),
    ("--loss-tile-tokens", "loss_tile_tokens", dict(type=int, metavar="N", help="tokens with logits at a time")),
    ("--sharding", "sharding", dict(choices=SHARDINGS, help="of parameters, gradients and Adam")),
]
_DEFAULTS = {field.name: field.default for field in fields(Scenario) if field.default is not MISSING}


def add_arguments(parser: argparse.ArgumentParser, searched: bool) -> None:
    """``searched``: what the user leaves out of the configuration is looked for, else it has a default."""
    parser.add_argument(
        "--model",
        required=True,
        help=f"{', '.join(PRESETS)}; a Hugging Face config.json, or its folder; or a file with Megatron-LM's flags",
    )
    add_machine(parser)
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size, with sequence parallelism (default 1)")
    parser.add_argument("--optimizer", choices=("gpu", "host"), default="gpu", help="where its states are (gpu)")
    parser.add_argument(
        "--documents",
        nargs="+",
        metavar="TOKENS",
        help="packed documents of these lengths, again and again until the sequence is full: 32K, or 128K 4K 4K",
    )
    parser.add_argument(
        "--packed-layout",
        choices=PACKED_LAYOUTS,
        help="document: each in a zigzag of its own, as --sft makes them (default); sequence: one for all, as "
        "--dataloader-inter-document-masking does",
    )
    parser.add_argument("--kernel", default="flash-attn-3", help="attention backend whose workspace is counted")
    group = parser.add_argument_group(
        "configuration", "what is left out is searched for" if searched else "defaults in parentheses"
    )
    for flag, name, options in _CONFIGURATION:
        default = {None: "all" if name == "keep_attention" else None}.get(_DEFAULTS[name], _DEFAULTS[name])
        shown = "" if searched or default is None else f" ({default})"
        group.add_argument(flag, dest=name, default=None, **{**options, "help": options["help"] + shown})


def add_machine(parser: argparse.ArgumentParser) -> None:
    """The GPUs, and the memory that they and their hosts have."""
    parser.add_argument("--gpus", type=int, required=True, help="of the whole run")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="default 8")
    parser.add_argument("--gpu-memory", type=float, default=80.0, metavar="GIB", help="of a card (default 80)")
    parser.add_argument("--host-memory", type=float, default=1770.0, metavar="GIB", help="of a node (1770, 1.9 TB)")
    parser.add_argument(
        "--reserve", type=float, default=RESERVE_GIB, metavar="GIB", help="of a card, not for tensors (default 6)"
    )


def scenario_of(args: argparse.Namespace, **others: Any) -> tuple[Scenario, frozenset[str]]:
    """What the flags say, and which fields of the configuration the user has chosen. Raises UPipeError."""
    given = {name: getattr(args, name) for _, name, _ in _CONFIGURATION if getattr(args, name) is not None}
    fixed = frozenset(given)
    if "keep_attention" in given:
        given["keep_attention"] = layers_kept(given["keep_attention"], "--keep-attention")
    documents = None
    if args.documents:
        documents = tuple(parse_tokens(length, "--documents") for length in args.documents)
    elif args.packed_layout:
        raise UPipeError(f"--packed-layout {args.packed_layout} does nothing without --documents; add that")
    scenario = Scenario(
        model=find_model(args.model),
        gpus=args.gpus,
        gpus_per_node=args.gpus_per_node,
        tensor_parallel=args.tp,
        attention_backend=args.kernel,
        optimizer_on_host=args.optimizer == "host",
        documents=documents,
        packed_layout=args.packed_layout or "document",
        **given,
        **others,
    )
    return scenario, fixed


def tokens_of(args: argparse.Namespace) -> int:
    return parse_tokens(args.tokens)


def device_bytes(args: argparse.Namespace) -> float:
    """Of a card, for tensors. Raises UPipeError."""
    if not 0 <= args.reserve < args.gpu_memory:  # nor not a number
        raise UPipeError(
            f"--gpu-memory {args.gpu_memory:g} leaves nothing beside --reserve {args.reserve:g}; lower that"
        )
    return (args.gpu_memory - args.reserve) * GIB


def host_bytes_of(args: argparse.Namespace) -> float:
    """Of a node. Raises UPipeError."""
    if not args.host_memory >= 0:
        raise UPipeError(f"--host-memory {args.host_memory:g} is not an amount of memory; the least is 0")
    return args.host_memory * GIB


def layers_kept(given: str, flag: str) -> int | None:
    """None is all. Raises UPipeError."""
    if given == "all":
        return None
    if not given.isdecimal():
        raise UPipeError(f"{flag} {given} is not a number of layers; give one, or all")
    return int(given)
