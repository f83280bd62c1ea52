"""What the built-in GPT entry does differently under megatron-core 0.18: it hands Megatron a function that builds the
model, and batches know packed documents from ``--sft`` only."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.spec_utils import import_module
from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import core_transformer_config_from_args, pretrain_cfg_container_from_args

from megatron_upipe.errors import UPipeError


def start(args: Namespace, datasets: Callable, forward_step: Callable, embedding_ranks: Callable) -> None:
    """Runs Megatron's ``pretrain()``. Raises UPipeError for packed micro-batches of several samples."""
    if args.sft and args.micro_batch_size > 1:
        raise UPipeError(
            f"--micro-batch-size {args.micro_batch_size} with --sft is not in megatron-core 0.18; use 1, or 0.19"
        )
    settings = pretrain_cfg_container_from_args(args)
    kind = ModelType.encoder_or_decoder
    pretrain(settings, datasets, build_model, kind, forward_step, get_embedding_ranks=embedding_ranks)


def build_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """One pipeline stage's model, with the layers of ``--spec`` or, without it, those that Megatron's flags name."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    spec = import_module(args.spec) if args.spec else _stock_spec(args, config, vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def _stock_spec(args: Namespace, config: Any, vp_stage: int | None) -> Any:
    return get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=args.transformer_impl == "transformer_engine",
        normalization=args.normalization,
        qk_l2_norm=args.qk_l2_norm,
        vp_stage=vp_stage,
    )


def share_with_tensor_ranks(batch: dict[str, Any], packed: bool, **where: Any) -> dict[str, Any]:
    """Tensor-parallel rank 0's batch on all of them; collective over the tensor-parallel group."""
    return get_batch_on_this_tp_rank(batch, is_sft=packed, **where)


def take_context_shard(
    batch: dict[str, Any], whole_sequence: bool, cp_group: torch.distributed.ProcessGroup
) -> dict[str, Any]:
    """This context-parallel rank's tokens; of packed documents always a part of each (``whole_sequence`` is 0.19's)."""
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group)


def sample_length(args: Namespace) -> dict[str, int]:
    """For PackedSeqParams, which has no such field here."""
    return {}
