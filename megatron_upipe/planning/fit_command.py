"""``megatron-upipe fit``: whether a training command line fits, before it holds GPUs."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from typing import Any

from megatron_upipe.config import check_least
from megatron_upipe.errors import UPipeError
from megatron_upipe.planning import arguments
from megatron_upipe.planning.model_files import from_words
from megatron_upipe.planning.quiet import quiet
from megatron_upipe.planning.scenario import Scenario, parse_tokens, tokens_text
from megatron_upipe.planning.states import GIB

DESCRIPTION = """\
Simulates the step of a training command line, as `megatron-upipe simulate` does, and says whether it fits. Flags that
change no memory are passed over. For launch scripts: the same flags go to training afterwards.

  megatron-upipe fit --gpus 8 -- --num-layers 32 --hidden-size 4096 ... --upipe-keep-attention 12

Exit status 1: it does not fit.
"""

# Megatron's and UPipe's flags that the simulation knows beside the model's: flag -> arguments of add_argument
_KNOWN: dict[str, dict[str, Any]] = {
    "--seq-length": dict(type=int),
    "--micro-batch-size": dict(type=int, default=1),
    "--tensor-model-parallel-size": dict(type=int, default=1),
    "--pipeline-model-parallel-size": dict(type=int, default=1),
    "--context-parallel-size": dict(type=int, default=1),
    "--hierarchical-context-parallel-sizes": dict(type=int, nargs="+"),
    "--bf16": dict(action="store_true"),
    "--sft": dict(action="store_true"),
    "--dataloader-inter-document-masking": dict(action="store_true"),
    "--use-megatron-fsdp": dict(action="store_true"),
    "--data-parallel-sharding-strategy": dict(default="no_shard"),
    "--use-distributed-optimizer": dict(action="store_true"),
    "--optimizer-cpu-offload": dict(action="store_true"),
    "--fp8-format": dict(),
    "--hybrid-layer-pattern": dict(),
    "--upipe-heads-per-stage": dict(type=int),
    "--upipe-attention-backend": dict(default="flash-attn-3"),
    "--upipe-keep-attention": dict(default="all"),
    "--upipe-offload": dict(default="none"),
    "--upipe-prefetch": dict(default="off"),
    "--upipe-overlap": dict(default="off"),
    "--upipe-checkpoint-every": dict(type=int, default=1),
    "--upipe-mlp-tile-tokens": dict(type=int, default=4096),
    "--upipe-loss-tile-tokens": dict(type=int, default=1024),
    "--upipe-rope": dict(),
}
_PASSED_OVER = ("--upipe-cpu", "--upipe-fp8-attention", "--upipe-metrics", "--upipe-exchange")
# The simulation's names for them, in its refusals
_NAMES = {
    "--keep-attention": "--upipe-keep-attention",
    "--checkpoint-every": "--upipe-checkpoint-every",
    "--mlp-tile-tokens": "--upipe-mlp-tile-tokens",
    "--loss-tile-tokens": "--upipe-loss-tile-tokens",
    "--prefetch": "--upipe-prefetch",
    "--offload": "--upipe-offload",
    "--kernel": "--upipe-attention-backend",
    "--tokens": "--seq-length",
    "--tp": "--tensor-model-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_machine(parser)
    parser.add_argument("--vocab-size", type=int, help="where the tokenizer knows it and the flags do not say it")
    parser.add_argument(
        "--documents", nargs="+", metavar="TOKENS", help="lengths of packed documents, as in `megatron-upipe simulate`"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("flags", nargs="+", metavar="-- FLAG", help="the training command line's flags")


def main(args: argparse.Namespace) -> int:
    """Exit status 0; 1 if it does not fit. Raises UPipeError for what cannot be simulated."""
    from megatron_upipe.planning.report import report

    device, host = arguments.device_bytes(args), arguments.host_bytes_of(args)
    words = args.flags if args.vocab_size is None else ["--vocab-size", str(args.vocab_size), *args.flags]
    scenario, notes = scenario_of_flags(words, args.gpus, args.gpus_per_node, args.documents)
    try:
        scenario.check()
    except UPipeError as error:
        raise UPipeError(re.sub(r"(?<![\w-])--[a-z-]+", lambda m: _NAMES.get(m[0], m[0]), str(error))) from error
    for note in notes:
        print(f"megatron-upipe: {note}", file=sys.stderr)
    print(f"simulating {tokens_text(scenario.tokens)} tokens ...", file=sys.stderr, flush=True)
    with quiet():
        found = report(scenario)
        fits = found.fits(device, host)
    if args.json:
        peaks = dict(device_peak_gib=found.device_peak / GIB, host_gib_per_node=found.host / GIB)
        print(json.dumps(dict(fits=fits, simulated=True, notes=notes, usable_gib=device / GIB, **peaks), indent=1))
    else:
        room = f"{args.gpu_memory:g} GiB less {args.reserve:g} of reserve, and {args.host_memory:g} GiB of a node"
        print(
            f"simulated peak of a GPU {found.device_peak / GIB:.1f} GiB, host memory of a node {found.host / GIB:.0f} "
            f"GiB: {'fits' if fits else 'DOES NOT FIT'} in {room}"
        )
    return 0 if fits else 1


def _check_flags(words: list[str], given: argparse.Namespace) -> None:
    """Raises UPipeError for what the simulation would silently take for something else."""
    if given.seq_length is None:
        raise UPipeError("the flags have no --seq-length; add it")
    if given.micro_batch_size != 1:
        raise UPipeError(f"--micro-batch-size {given.micro_batch_size} is not simulated; the nearest is 1")
    if given.hybrid_layer_pattern:
        raise UPipeError(f"--hybrid-layer-pattern {given.hybrid_layer_pattern}: only GPT models are simulated")
    ours = (word.partition("=")[0] for word in words if word.startswith("--upipe-"))
    for flag in (flag for flag in ours if flag not in (*_KNOWN, *_PASSED_OVER)):
        near = difflib.get_close_matches(flag, _KNOWN, n=1, cutoff=0)[0]
        raise UPipeError(f"unknown flag {flag}; the nearest known one is {near}")
    if not given.bf16:
        raise UPipeError("the flags have no --bf16, the only precision that is simulated; add it")
    if given.use_megatron_fsdp and given.data_parallel_sharding_strategy != "optim_grads_params":
        raise UPipeError(
            f"--data-parallel-sharding-strategy {given.data_parallel_sharding_strategy} (no_shard is the default) is "
            "not simulated; the nearest is optim_grads_params"
        )


def scenario_of_flags(
    words: list[str], gpus: int, gpus_per_node: int, documents: list[str] | None = None
) -> tuple[Scenario, list[str]]:
    """What flags of ``python -m megatron_upipe.run`` describe, and what was taken otherwise. Raises UPipeError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag, options in _KNOWN.items():
        parser.add_argument(flag, **options)
    try:
        given, _ = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UPipeError(str(error)) from error
    check_least("--gpus", gpus, 1)
    _check_flags(words, given)
    notes = []
    packed = given.sft or given.dataloader_inter_document_masking
    if packed and documents is None:
        notes.append("packed documents are simulated as one; --documents says their lengths")
    ranks = given.tensor_model_parallel_size * given.pipeline_model_parallel_size * given.context_parallel_size
    if gpus % ranks:
        raise UPipeError(f"--gpus {gpus} is no multiple of the {ranks} ranks of a model; the nearest is {ranks}")
    if gpus > ranks:
        notes.append(f"one of {gpus // ranks} data-parallel replicas is simulated; shared states may take less")
    if given.fp8_format:
        notes.append(f"--fp8-format {given.fp8_format} is simulated in 16 bits")
    sizes = given.hierarchical_context_parallel_sizes or (given.context_parallel_size, 1)
    if len(sizes) != 2 or sizes[0] * sizes[1] != given.context_parallel_size:
        raise UPipeError(
            f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))}: P x R has to be "
            f"--context-parallel-size {given.context_parallel_size}; the nearest is {given.context_parallel_size} 1"
        )
    p, r = sizes
    sharding = "distributed-optimizer" if given.use_distributed_optimizer else "ddp"
    scenario = Scenario(
        model=from_words(words, "the command line"),
        gpus=ranks,
        tokens=given.seq_length,
        gpus_per_node=gpus_per_node,
        tensor_parallel=given.tensor_model_parallel_size,
        pipeline_parallel=given.pipeline_model_parallel_size,
        ulysses=p,
        ring=r,
        heads_per_stage=given.upipe_heads_per_stage,
        keep_attention=arguments.layers_kept(given.upipe_keep_attention, "--upipe-keep-attention"),
        offload=given.upipe_offload,
        prefetch="on" if given.upipe_prefetch == "on" else "off",  # auto prefetches where there is room
        overlap="on" if given.upipe_overlap == "on" else "off",  # auto overlaps where there is room
        checkpoint_every=given.upipe_checkpoint_every,
        mlp_tile_tokens=given.upipe_mlp_tile_tokens,
        loss_tile_tokens=given.upipe_loss_tile_tokens,
        attention_backend="flash-attn-3" if given.upipe_attention_backend == "auto" else given.upipe_attention_backend,
        sharding="megatron-fsdp" if given.use_megatron_fsdp else sharding,
        optimizer_on_host=given.optimizer_cpu_offload,
        rope=given.upipe_rope,
        documents=documents and tuple(parse_tokens(length, "--documents") for length in documents),
        packed_layout="document" if given.sft else "sequence",
    )
    return scenario, notes
