"""Packed documents on their way from Megatron's data loader to the layers: each context-parallel rank's tokens.

Megatron takes the per-document partition from TransformerEngine's CUDA extension; here it is index arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_upipe.context.blocks import numbers
from megatron_upipe.context.layout import SequenceLayout
from megatron_upipe.context.segments import packed_segments
from megatron_upipe.integration.symbols import Replacement
from megatron_upipe.integration.upipe_spec import wants_upipe

SEQUENCES = ("tokens", "labels", "loss_mask", "position_ids")


def partition_indices(
    cumulative: torch.Tensor, tokens: int, ranks: int, rank: int, device: torch.device
) -> torch.Tensor:
    """int64 [tokens / ranks]: the tokens of ``rank``, each document in a zigzag over all ``ranks``.

    ``cumulative`` lengths [documents + 1] with padding, multiples of twice the ranks. As TransformerEngine's
    ``thd_get_partitioned_indices``. Raises UPipeError.
    """
    lengths = cumulative.tolist()
    segments = packed_segments(SequenceLayout(ranks, 1), tokens, lengths, lengths, per_document=True)
    return numbers(segments.shard(rank), device)


def _partition(original: Callable) -> Callable:
    def partition(batch: dict[str, Any], cp_group: torch.distributed.ProcessGroup) -> dict[str, Any]:
        from megatron.training import get_args

        if not wants_upipe(get_args()) or cp_group.size() == 1:
            return original(batch, cp_group)
        cumulative = batch["cu_seqlens_padded"] if batch.get("cu_seqlens_padded") is not None else batch["cu_seqlens"]
        given = {key: batch[key] for key in SEQUENCES if batch.get(key) is not None}
        first = next(iter(given.values()))
        indices = partition_indices(cumulative[0], first.shape[1], cp_group.size(), cp_group.rank(), first.device)
        return batch | {key: tensor.index_select(1, indices) for key, tensor in given.items()}

    return partition


def replacements() -> list[Replacement]:
    why = "the per-document partition needs TransformerEngine and a GPU"
    return [
        Replacement(
            "megatron.core.utils:_get_batch_on_this_cp_rank_per_document_balancing", _partition, why, ">=0.19,<0.20"
        ),
        Replacement("megatron.core.utils:get_sft_batch_on_this_cp_rank", _partition, why, ">=0.18,<0.19"),
    ]
