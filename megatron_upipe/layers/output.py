"""Megatron's output layer and loss replaced by the tiled ones, as an ``output_processor`` of its GPTModel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from megatron_upipe.layers.loss import LossCall, TiledLossFunction
from megatron_upipe.layers.tiles import Tiles


def tiled_losses(
    *,
    hidden_states: Tensor,
    output_layer: torch.nn.Module,
    output_weight: Tensor | None,
    labels: Tensor,
    scale_logits: Callable[[Tensor], Tensor],
    config: Any,
    **others: Any,
) -> Tensor:
    """Losses [b, s] of every token, as ``GPTModel.forward`` returns them; arguments are those that it hands over.

    ``output_weight`` is the embedding's weight where it is shared. Collective over tensor parallelism.
    """
    group = output_layer.tp_group
    size = group.size() if group is not None else 1
    sequence_parallel = output_layer.sequence_parallel and size > 1
    weight = output_layer.weight if output_weight is None else output_weight
    tokens, micro_batch, _ = hidden_states.shape
    reduce = (
        reduce_scatter_to_sequence_parallel_region if sequence_parallel else reduce_from_tensor_model_parallel_region
    )
    call = LossCall(
        tiles=Tiles.of(tokens, config.upipe.loss_tile_tokens, micro_batch, size if sequence_parallel else 1),
        logits=lambda rows: output_layer(rows, weight=output_weight)[0],
        weight=lambda: output_layer.weight if output_weight is None else output_weight,
        gather=partial(gather_from_sequence_parallel_region, group=group) if sequence_parallel else lambda t: t,
        reduce_input=partial(reduce, group=group) if size > 1 else lambda t: t,
        group=group if size > 1 else None,
        first=(group.rank() if size > 1 else 0) * weight.shape[0],
        scale=float(scale_logits(1.0)),
        fuse=config.gradient_accumulation_fusion,
    )
    labels = labels.transpose(0, 1).contiguous()
    losses = TiledLossFunction.apply(torch.is_grad_enabled(), call, hidden_states, labels, weight)
    return losses.transpose(0, 1).contiguous()
