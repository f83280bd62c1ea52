"""The exchange: all-to-all between sequence shards and head shards within the Ulysses group.

    sequence shard                          head shard
    [s, b, P*n, d]   -- start_to_heads ->   [b, n, L, d]     n heads of each rank, heads rank-major
                     <- start_to_sequence --                 L = P*s tokens in attention order (front half, back half)

Several tensors of one dtype travel together, in one collective. Where the zigzag begins anew with every document,
``order`` [L] says which of the tokens, rank by rank, comes where. All functions are collective over the Ulysses group;
without a transport (P = 1) they only reorder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from megatron_upipe.context.transport import Sending, Transport


class Part(Protocol):
    """Something that is made where it is packed, in the place of a tensor [s, b, P*n, d]."""

    tensor: Tensor

    def write(self, target: Tensor) -> None:
        """Writes it to ``target`` [P, s, b, n, d]."""
        ...


Arrival = Callable[[], list[Tensor]]
"""Waits for an exchange; what came is owned by the caller. To be called once."""


def start_to_heads(parts: list[Tensor | Part], transport: Transport | None, order: Tensor | None = None) -> Arrival:
    """Starts to bring each ``[s, b, P*n, d]`` (any strides, n and d of its own) to ``[b, n, L, d]``, contiguous.

    Takes the tensors out of ``parts``, so that their memory is free where nobody else holds them.
    """
    p = 1 if transport is None else transport.size
    shapes = [_by_rank(_tensor(part), p).shape for part in parts]
    if transport is None:
        alone = [_by_rank(part, 1) if part is _tensor(part) else _packed([part], shapes[:1]) for part in parts]
        parts.clear()
        return lambda: [_in_attention_order(alone.pop(0).view(shape), order) for shape in shapes]
    sending = transport.start(_packed(parts, shapes))

    def arrival() -> list[Tensor]:
        return [_in_attention_order(part, order) for part in _unpacked(_arrived(sending), shapes)]

    return arrival


def start_to_sequence(parts: list[Tensor], transport: Transport | None, order: Tensor | None = None) -> Arrival:
    """Starts to bring each ``[b, n, L, d]`` to a view ``[s, b, P, n, d]`` (any strides); inverse of the other.

    Takes the tensors out of ``parts``.
    """
    p = 1 if transport is None else transport.size
    shapes = [torch.Size((p, part.shape[2] // p, part.shape[0], part.shape[1], part.shape[3])) for part in parts]
    send = parts[0].new_empty(p, *shapes[0][1:3], sum(shape[3:].numel() for shape in shapes))
    for target in _unpacked(send, shapes):
        _from_attention_order(parts.pop(0), target, order)
    sending = None if transport is None else transport.start(send)

    def arrival() -> list[Tensor]:
        received = send_alone.pop() if sending is None else _arrived(sending)
        return [part.permute(1, 2, 0, 3, 4) for part in _unpacked(received, shapes)]

    send_alone = [send] if sending is None else []
    del send
    return arrival


@record_function("upipe exchange: wait")
def _arrived(sending: Sending) -> Tensor:
    return sending.wait()


def _tensor(part: Tensor | Part) -> Tensor:
    return part if isinstance(part, Tensor) else part.tensor


def _by_rank(part: Tensor, p: int) -> Tensor:
    """[s, b, P*n, d] -> view [P, s, b, n, d]."""
    return part.unflatten(2, (p, -1)).permute(2, 0, 1, 3, 4)


@record_function("upipe exchange: pack")
def _packed(parts: list[Tensor | Part], shapes: list[torch.Size]) -> Tensor:
    """One contiguous [P, s, b, sum of n*d] of all parts, which are taken out of the list."""
    send = _tensor(parts[0]).new_empty(*shapes[0][:3], sum(shape[3:].numel() for shape in shapes))
    for target in _unpacked(send, shapes):
        part = parts.pop(0)
        if isinstance(part, Tensor):
            target.copy_(_by_rank(part, target.shape[0]))
        else:
            part.write(target)
    return send


def _unpacked(packed: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    """Views [P, s, b, n, d] of the parts of [P, s, b, sum of n*d]."""
    widths = [shape[3:].numel() for shape in shapes]
    return [part.unflatten(3, shape[3:]) for part, shape in zip(packed.split(widths, 3), shapes, strict=True)]


@record_function("upipe exchange: into attention order")
def _in_attention_order(received: Tensor, order: Tensor | None) -> Tensor:
    """[P, s, b, n, d], rank by rank -> [b, n, L, d]: each half is copied once, to its place."""
    p, s, b, n, d = received.shape
    if order is not None:
        return received.flatten(0, 1).permute(1, 2, 0, 3).index_select(2, order)
    half = s // 2
    out = received.new_empty(b, n, 2, p, half, d)
    out[:, :, 0] = received[:, :half].permute(2, 3, 0, 1, 4)  # fronts: rising with the rank
    # backs: falling; the places are counted from behind, for a flip would copy them
    for rank in range(p):
        out[:, :, 1, p - 1 - rank] = received[rank, half:].permute(1, 2, 0, 3)
    return out.view(b, n, p * s, d)


@record_function("upipe exchange: from attention order")
def _from_attention_order(heads: Tensor, target: Tensor, order: Tensor | None) -> None:
    """The reverse, into ``target`` [P, s, b, n, d]."""
    p, s = target.shape[:2]
    if order is not None:
        target.view(p * s, *target.shape[2:]).index_copy_(0, order, heads.permute(2, 0, 1, 3))
        return
    half = s // 2
    halves = heads.unflatten(2, (2, p, half))  # [b, n, 2, P, s/2, d]
    target[:, :half] = halves[:, :, 0].permute(2, 3, 0, 1, 4)
    for rank in range(p):
        target[rank, half:] = halves[:, :, 1, p - 1 - rank].permute(2, 0, 1, 3)
