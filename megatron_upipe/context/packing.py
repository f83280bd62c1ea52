"""The segments of a batch on the device: order of the exchange, positions, and what Megatron hands over."""

from __future__ import annotations

import weakref
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_upipe.context.blocks import numbers
from megatron_upipe.context.groups import ContextGroups
from megatron_upipe.context.segments import Segments, packed_segments
from megatron_upipe.errors import UPipeError


def exchange_order(segments: Segments, ring_rank: int, device: torch.device) -> Tensor | None:
    """For ``context.exchange``: which of the Ulysses ranks' tokens, rank by rank, is next in attention order.

    None where that is fronts and backs as they come.
    """
    if len(segments.spans) == 2:
        return None

    def make() -> Tensor:
        p = segments.layout.ulysses_size
        ranks = range(ring_rank * p, (ring_rank + 1) * p)
        return torch.argsort(numbers([half for rank in ranks for half in segments.shard(rank)], device))

    return segments.remembered(("exchange order", ring_rank, device), make)


def positions_in_documents(segments: Segments, rank: int, device: torch.device) -> Tensor:
    """int64 [s]: of the tokens of context-parallel rank ``rank``, counted from where their documents begin.

    In padding behind a document it goes on counting.
    """

    def make() -> Tensor:
        positions = numbers(segments.shard(rank), torch.device("cpu"))
        starts = torch.tensor(segments.starts)
        return (positions - starts[torch.searchsorted(starts, positions, right=True) - 1]).to(device)

    return segments.remembered(("positions", rank, device), make)


class PackedBatches:
    """Turns the packed parameters of a micro-batch into segments, once for all layers."""

    def __init__(self) -> None:
        self._last: tuple[Any, tuple, Segments] | None = None

    def segments(
        self, packed: Any, groups: ContextGroups, tokens: int, per_document: bool, device: torch.device
    ) -> Segments:
        """Of Megatron's PackedSeqParams for ``tokens`` of each context-parallel rank, whose tensors are on ``device``.

        Reads the cumulative lengths on the host. Collective over the context-parallel group, which has to agree on
        them: all its ranks are to be given new parameters at the same time. A training loop that knows the documents on
        the host may spare both: by an attribute ``upipe_segments``, the ``Segments``, the same on all ranks. Raises
        UPipeError.
        """
        known = getattr(packed, "upipe_segments", None)
        if known is not None:
            _check_known(known, groups, tokens)
            return known
        key = (groups.layout, groups.rank, tokens, per_document, *_versions(packed))
        if self._last is not None and self._last[0]() is packed and self._last[1] == key:
            return self._last[2]
        found = _made(packed, groups, tokens, per_document)
        # first compared, then raised: or else the other ranks would wait for this one
        shown = (found.spans, found.documents, found.starts) if isinstance(found, Segments) else str(found)
        if _differ(repr(shown), groups, device) and isinstance(found, Segments):
            raise UPipeError(
                "the ranks of a context-parallel group were given different packed_seq_params; give all of them the "
                "same lengths of the whole sequence"
            )
        if isinstance(found, UPipeError):
            raise found
        self._last = weakref.ref(packed), key, found
        return found


def _made(packed: Any, groups: ContextGroups, tokens: int, per_document: bool) -> Segments | UPipeError:
    try:
        padded, real = _lengths(packed)
        return packed_segments(groups.layout, tokens * groups.layout.size, padded, real, per_document)
    except UPipeError as error:
        return error


def _check_known(known: Segments, groups: ContextGroups, tokens: int) -> None:
    length = tokens * groups.layout.size
    if (known.layout, known.length) != (groups.layout, length):
        raise UPipeError(
            f"packed_seq_params.upipe_segments are of {known.length} tokens on {known.layout}; these ranks have "
            f"{length} on {groups.layout}"
        )


def _versions(packed: Any) -> list[Any]:
    """The tensors of lengths and how often they were written to; a caller may use the same object again."""
    names = (f"cu_seqlens_{which}{padded}" for which in ("q", "kv") for padded in ("", "_padded"))
    tensors = [getattr(packed, name, None) for name in names]
    return [(_Same(t), None if t is None or t.is_inference() else t._version) for t in tensors]


class _Same:
    """Compares a tensor by identity, and keeps it from being another one's successor at its address."""

    def __init__(self, tensor: Tensor | None) -> None:
        self._tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._tensor is other._tensor

    __hash__ = None


def _differ(shown: str, groups: ContextGroups, device: torch.device) -> bool:
    """Whether the context-parallel ranks have different ones; they would wait for each other for ever. Collective."""
    mine = zlib.crc32(shown.encode())
    extremes = torch.tensor([mine, -mine], device=device)
    for group in (groups.ulysses, groups.ring):
        if group is not None:
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    largest, least = extremes.tolist()
    return largest != -least


def _lengths(packed: Any) -> tuple[list[int], list[int]]:
    """Cumulative lengths with padding and of the real tokens. Raises UPipeError for what is not self-attention."""
    if packed.qkv_format != "thd":
        raise UPipeError(f"packed_seq_params with qkv_format {packed.qkv_format} are not supported by UPipe; use thd")
    for name in ("local_cp_size", "cp_group"):
        if getattr(packed, name, None) is not None:
            raise UPipeError(f"packed_seq_params.{name} is not supported by UPipe; leave --hybrid-context-parallel out")
    real, padded = _same(packed, "cu_seqlens_{}"), _same(packed, "cu_seqlens_{}_padded")
    if real is None:
        raise UPipeError("packed_seq_params without cu_seqlens_q; give the documents' cumulative lengths")
    return real if padded is None else padded, real


def _same(packed: Any, name: str) -> list[int] | None:
    """The lengths of queries, which have to be those of keys."""
    queries, keys = (getattr(packed, name.format(which), None) for which in ("q", "kv"))
    found = [None if t is None else t.flatten().tolist() for t in ((queries,) if keys is queries else (queries, keys))]
    if found[0] != found[-1]:
        raise UPipeError(f"packed_seq_params.{name.format('q')} and {name.format('kv')} differ; use the same lengths")
    return found[0]
