"""What the built-in GPT entry does differently under megatron-core 0.19: Megatron builds the model from a config, and
batches may hold several sequences of packed documents."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args


def start(args: Namespace, datasets: Callable, forward_step: Callable, embedding_ranks: Callable) -> None:
    """Runs Megatron's ``pretrain()``."""
    settings = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(settings, datasets, ModelType.encoder_or_decoder, forward_step, get_embedding_ranks=embedding_ranks)


def share_with_tensor_ranks(batch: dict[str, Any], packed: bool, **where: Any) -> dict[str, Any]:
    """Tensor-parallel rank 0's batch on all of them, one sequence if it is packed; collective over that group."""
    return flatten_batch_for_packed_sequences(get_batch_on_this_tp_rank(batch, has_cu_seqlens=packed, **where))


def take_context_shard(
    batch: dict[str, Any], whole_sequence: bool, cp_group: torch.distributed.ProcessGroup
) -> dict[str, Any]:
    """This context-parallel rank's tokens: of the whole sequence, or of each packed document a part."""
    return get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=cp_group, use_per_sequence_balancing=whole_sequence
    )


def sample_length(args: Namespace) -> dict[str, int]:
    """For PackedSeqParams, which wants to know where each sample of a micro-batch ends."""
    return {"tokens_per_sample": args.seq_length}
