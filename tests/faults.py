"""Planted faults: what must not go unnoticed, by the unit tests and by the selftest."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron_upipe.attention import backward, forward, module, tensor_parallel
from megatron_upipe.attention.plan import AttentionParameters
from megatron_upipe.context import blocks, exchange


class Fault(NamedTuple):
    """``plant(monkeypatch)``, and a layout with 8 query and 2 KV heads in which it shows."""

    plant: Callable
    tp: int
    p: int
    r: int
    heads_per_stage: int
    shows_in: str


def _swap_heads(patch):
    """What comes back from the exchange goes to the neighbouring head."""

    def start_to_sequence(*args):
        arrival = exchange.start_to_sequence(*args)
        return lambda: [part.flatten(2, 3).roll(1, dims=2).view(part.shape) for part in arrival()]

    for pass_ in (forward, backward):
        patch.setattr(pass_, "start_to_sequence", start_to_sequence)


def _forget_zigzag(patch):
    """Backs are taken in rising instead of falling order of the rank."""

    def rising(received, order):
        p, s, b, n, d = received.shape
        both = received.unflatten(1, (2, s // 2)).permute(3, 4, 1, 0, 2, 5)
        return both.reshape(b, n, 2, p, s // 2, d).reshape(b, n, p * s, d)

    patch.setattr(exchange, "_in_attention_order", rising)


def _drop_ring_step(patch):
    """Every second merge of a ring step is left out."""
    original, calls = blocks.merge_, []

    def merge_(*args):
        calls.append(1)
        if len(calls) % 2:
            original(*args)

    patch.setattr(blocks, "merge_", merge_)


def _forget_to_sum_copies(patch):
    """dK and dV of a KV head that several ranks attend are taken from the first only."""
    original = torch.Tensor.sum

    def first(self, dim=None, keepdim=False, dtype=None):
        if dim == 3 and keepdim:
            return self[:, :, :, :1].to(dtype)
        return original(self) if dim is None else original(self, dim, keepdim=keepdim, dtype=dtype)

    patch.setattr(torch.Tensor, "sum", first)


def _read_weights_past_the_call(patch):
    """As if no hook had to gather them."""

    def weights(self):
        return AttentionParameters(self.linear_qkv.weight, self.linear_qkv.bias, self.linear_proj.weight)

    patch.setattr(module.UPipeSelfAttention, "_attention_parameters", weights)


def _forget_sequence_parallel_reduce(patch):
    """dx is cut into shards without the sum over the tensor-parallel group."""

    def cut(gradient, group):
        return gradient.chunk(group.size())[group.rank()].contiguous()

    patch.setattr(tensor_parallel, "reduce_scatter_to_sequence_parallel_region", cut)


FAULTS = {
    "head swap": Fault(_swap_heads, 1, 2, 2, 2, "output"),
    "zigzag order": Fault(_forget_zigzag, 1, 2, 2, 2, "output"),
    "dropped ring step": Fault(_drop_ring_step, 1, 1, 4, 8, "output"),
    "unsummed dK": Fault(_forget_to_sum_copies, 1, 4, 1, 4, "linear_qkv.weight"),
    "stale weight": Fault(_read_weights_past_the_call, 1, 2, 2, 4, "output"),
    "missing sequence-parallel reduce": Fault(_forget_sequence_parallel_reduce, 2, 2, 1, 2, "dx"),
}
