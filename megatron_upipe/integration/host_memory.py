"""Whether the host store will fit, asked before the first step."""

from __future__ import annotations

import socket
from argparse import Namespace
from typing import Any

import torch.distributed as dist
from megatron.core.transformer.identity_op import IdentityOp

from megatron_upipe.memory.host_need import (
    WaitingBytes,
    available_bytes,
    check_hosts,
    chunk_bytes,
    store_bytes,
    waiting_bytes,
)


def check_host_memory(args: Namespace, model: list[Any]) -> None:
    """Raises UPipeError on all ranks if a host has too little memory for its ranks' stores. Collective."""
    needed = host_store_bytes(args, model)
    needs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(needs, (socket.gethostname(), needed, available_bytes()))
    check_hosts(needs)


def host_store_bytes(args: Namespace, model: list[Any]) -> int:
    """What this rank's store will hold at most. Not collective."""
    from megatron_upipe.layers.mlp_layer import UPipeMLPLayer
    from megatron_upipe.layers.transformer_layer import UPipeTransformerLayer

    chunks = []
    for chunk in model:
        layers = [m for m in chunk.modules() if isinstance(m, UPipeTransformerLayer)]
        keeps = [layer.keeps for layer in layers]
        every = args.upipe_checkpoint_every or 1
        waiting, more = chunk_bytes(_layer_bytes(args, layers[0]), keeps, every) if layers else (0, 0)
        mlps = [m for m in chunk.modules() if isinstance(m, UPipeMLPLayer)]  # they keep their inputs
        waiting += sum(_layer_bytes(args, layer).input for layer in mlps)
        chunks.append((waiting, more))
    return store_bytes(chunks, *forward_order(args, len(model)))


def forward_order(args: Namespace, model_chunks: int) -> tuple[list[int], int]:
    """Of which model chunk each forward pass of a step is, and how many come before the first backward pass; from
    Megatron's pipeline schedules."""
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    micro_batches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    group = args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size
    _, _, warmup, _ = get_pp_rank_microbatches(micro_batches, model_chunks, group)
    return [chunk for _, chunk in get_schedule_table(micro_batches, model_chunks, group)], warmup


def _layer_bytes(args: Namespace, layer: Any) -> WaitingBytes:
    attention, config = layer.self_attention, layer.config
    attends = not isinstance(attention, IdentityOp)
    return waiting_bytes(
        tokens=args.seq_length // args.context_parallel_size,
        micro_batch=args.micro_batch_size,
        hidden=args.hidden_size,
        heads=attention.num_attention_heads_per_partition if attends else 0,
        head_dim=attention.hidden_size_per_attention_head if attends else 0,
        shards=config.tensor_model_parallel_size if config.sequence_parallel else 1,
        itemsize=args.params_dtype.itemsize,
    )
