"""Checks of parsed arguments before anything is built."""

from __future__ import annotations

import os
from argparse import Namespace

import torch

from megatron_upipe.attention.schedule import head_schedule
from megatron_upipe.checks import (
    check_fp8_attention,
    check_fp8_sizes,
    check_hybrid_policy,
    check_model,
    check_parallelism,
    only_experts,
)
from megatron_upipe.errors import UPipeError
from megatron_upipe.integration import cpu
from megatron_upipe.integration.upipe_spec import (
    LAYER_FLAGS,
    SPEC,
    UPIPE_FLAGS,
    builds_hybrid,
    keep_attention,
    loss_tile_tokens,
    masks_documents,
    say,
    upipe_config,
    wants_upipe,
)
from megatron_upipe.kernels.select import AUTO, fp8_kernel, select_kernel
from megatron_upipe.precision.recipes import check_alignment, fp8_recipe
from megatron_upipe.precision.select import select_precision


def check_upipe(args: Namespace) -> None:
    """Refuses what UPipe cannot do, naming the flag; switches the data loader's attention mask off.

    To be called on parsed arguments before Megatron validates them. Raises UPipeError.
    """
    if not wants_upipe(args):
        for attribute, flag in UPIPE_FLAGS.items():
            if getattr(args, attribute) is not None:
                raise UPipeError(f"{flag} does nothing without the spec; add --spec {SPEC} upipe_layer_spec")
        return
    if args.heterogeneous_layers_config_path is not None:
        raise UPipeError(
            "--heterogeneous-layers-config-path chooses the layers itself and would bypass --spec; leave one out"
        )
    _check_hybrid(args)
    if args.num_attention_heads is None:  # Megatron says what is missing
        return
    check_parallelism(
        query_heads=args.num_attention_heads,
        kv_heads=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        tensor_parallel_size=args.tensor_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        hierarchical_sizes=args.hierarchical_context_parallel_sizes,
        heads_per_stage=args.upipe_heads_per_stage,
        sequence_length=args.seq_length,
        sequence_parallel=args.sequence_parallel and args.tensor_model_parallel_size > 1,
    )
    if args.use_rotary_position_embeddings:  # Megatron's older way to say it
        args.position_embedding_type = "rope"
    _check_memory_flags(args)
    if args.upipe_fp8_attention not in (None, "off") and not args.fp8:
        raise UPipeError(
            f"--upipe-fp8-attention {args.upipe_fp8_attention} is for layers in FP8; add --fp8-format hybrid"
        )
    if args.context_parallel_size == 1:
        return
    if args.recompute_activations:
        args.recompute_granularity = "selective"
    check_model(args, training=True)
    _check_fp8(args)
    _check_backend(args)
    packed = "--sft" if args.sft else "--dataloader-inter-document-masking"
    one_sequence = args.micro_batch_size in (None, 1) or args.pipeline_model_parallel_size == 1
    if (args.sft or masks_documents(args)) and not one_sequence:
        raise UPipeError(
            f"--micro-batch-size {args.micro_batch_size} with {packed} is one sequence in Megatron, which its pipeline "
            "stages do not expect; use 1, or --pipeline-model-parallel-size 1"
        )
    uneven = "--sft" if args.sft else "--eod-mask-loss"
    if (args.sft or args.eod_mask_loss) and not args.calculate_per_token_loss:
        say(
            f"with {uneven} each context-parallel rank divides by its own number of tokens, in Megatron itself; "
            "add --calculate-per-token-loss for the losses of one rank"
        )
    if args.create_attention_mask_in_dataloader:
        args.create_attention_mask_in_dataloader = False
        say("--no-create-attention-mask-in-dataloader set; UPipe masks by itself")


def hybrid_pattern(args: Namespace) -> str | None:
    """The layers of a hybrid model, one character each; None for GPT."""
    return args.hybrid_layer_pattern or args.hybrid_override_pattern


def _check_hybrid(args: Namespace) -> None:
    """The spec must be of the kind of model that the script builds; Megatron fails far from the reason."""
    pattern, shown = hybrid_pattern(args), "--spec " + " ".join(args.spec)
    if pattern is None and builds_hybrid(args):
        raise UPipeError(f"{shown} needs --hybrid-layer-pattern; add that, or use upipe_layer_spec for a GPT model")
    if pattern is None:
        return
    if not builds_hybrid(args):
        raise UPipeError(
            f"--hybrid-layer-pattern {pattern} needs the spec of a hybrid stack, not {shown}; use {SPEC} "
            "upipe_hybrid_stack_spec"
        )
    if "/" in pattern:
        raise UPipeError(
            f"--hybrid-layer-pattern {pattern} has multi-token prediction, which UPipe has not; the nearest is "
            f"{pattern.partition('/')[0]}"
        )
    if "*" not in pattern:
        raise UPipeError(f"--hybrid-layer-pattern {pattern} has no attention layer (*); leave --spec out")
    check_hybrid_policy(upipe_config(args), args.pipeline_model_parallel_size)


def _check_backend(args: Namespace) -> None:
    """A backend that is asked for must serve the model; ``auto`` finds one."""
    if args.upipe_attention_backend is not None:
        select_kernel(*_inputs(args), args.upipe_attention_backend, window=_has_window(args))


def _has_window(args: Namespace) -> bool:
    return args.window_size is not None and args.window_size[0] >= 0


def _inputs(args: Namespace) -> tuple[torch.device, torch.dtype, int]:
    """What attention kernels will be given: device, dtype, head size."""
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    device = torch.device("cpu") if cpu.is_installed() else torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device, dtype, args.kv_channels or args.hidden_size // args.num_attention_heads


def _check_fp8(args: Namespace) -> None:
    """The GPU, TransformerEngine and all sizes; layers do not know the number of tokens before the first call."""
    recipe = fp8_recipe(args)
    if recipe is None or None in (args.hidden_size, args.seq_length, args.micro_batch_size):
        return  # Megatron says what is missing
    tp = args.tensor_model_parallel_size
    p, r = args.hierarchical_context_parallel_sizes or (args.context_parallel_size, 1)
    heads = args.num_attention_heads
    kv_heads = args.num_query_groups if args.group_query_attention else heads
    schedule = head_schedule(heads // tp, kv_heads // tp, p, args.upipe_heads_per_stage)
    device, dtype, head_dim = _inputs(args)
    no_dense = only_experts(args.num_experts, args.moe_layer_freq) or not args.ffn_hidden_size
    check_fp8_sizes(
        recipe,
        schedule,
        hidden=args.hidden_size,
        ffn=None if no_dense else args.ffn_hidden_size // tp,
        head_dim=head_dim,
    )
    what = "the tokens of a rank (--seq-length x --micro-batch-size / --context-parallel-size)"
    check_alignment(recipe, {what: args.seq_length // args.context_parallel_size * args.micro_batch_size})
    mode = args.upipe_fp8_attention or "off"
    for flag, given in (
        ("--window-size", _has_window(args)),
        ("--sft", args.sft),
        ("--dataloader-inter-document-masking", masks_documents(args)),
    ):
        if given and mode != "off":
            raise UPipeError(f"--upipe-fp8-attention {mode} does not work with {flag}; use --upipe-fp8-attention off")
    check_fp8_attention(mode, schedule, tokens=args.seq_length // r, ring_size=r, head_dim=head_dim)
    select_precision(recipe, device, dtype)
    if mode != "off":
        base = select_kernel(device, dtype, head_dim, args.upipe_attention_backend or AUTO)
        fp8_kernel(mode, base, device, dtype, head_dim)


def _check_memory_flags(args: Namespace) -> None:
    for name in LAYER_FLAGS:
        if args.context_parallel_size == 1 and getattr(args, name) is not None:
            raise UPipeError(
                f"{UPIPE_FLAGS[name]} does nothing with --context-parallel-size 1, where Megatron's own layers run; "
                "leave it out"
            )
    upipe_config(args)  # checks each value by itself
    pattern = hybrid_pattern(args)
    keep, layers = keep_attention(args), pattern.count("*") if pattern is not None else args.num_layers
    what = "layers" if pattern is None else "attention layers"
    if keep is not None and layers is not None and keep > layers:
        raise UPipeError(
            f"--upipe-keep-attention {keep} is more than the {layers} {what}; the most is {layers} (or all)"
        )
    if layers is not None and (args.upipe_checkpoint_every or 1) > layers:
        raise UPipeError(
            f"--upipe-checkpoint-every {args.upipe_checkpoint_every} is more than the {layers} layers; the most is "
            f"{layers}"
        )
    if args.upipe_prefetch is not None and args.upipe_offload != "host":
        raise UPipeError(f"--upipe-prefetch {args.upipe_prefetch} does nothing without --upipe-offload host; add that")
    if not loss_tile_tokens(args):
        return
    if args.cross_entropy_loss_fusion:
        raise UPipeError(
            f"--cross-entropy-loss-fusion does nothing with --upipe-loss-tile-tokens {loss_tile_tokens(args)}, which "
            "never makes all logits; leave one out"
        )
    if args.defer_embedding_wgrad_compute:
        raise UPipeError(
            "--defer-embedding-wgrad-compute does not work with the tiled loss; leave it out, or add "
            "--upipe-loss-tile-tokens 0"
        )
