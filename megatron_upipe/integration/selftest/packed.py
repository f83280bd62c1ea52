"""Stock self-attention document by document and UPipe's on the packed documents side by side."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import accumulate

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_upipe.context.layout import SequenceLayout
from megatron_upipe.context.segments import Segments, packed_segments
from megatron_upipe.integration.selftest.parity import (
    Case,
    device,
    finalized,
    relative_error,
    rotary_table,
    stock_attention,
    tp_shard,
    upipe_attention,
)


@dataclass(frozen=True)
class Packing:
    """Lengths of documents, real and with padding, in a sequence of ``length`` tokens; ``layout`` of UPipeConfig."""

    real: tuple[int, ...]
    padded: tuple[int, ...]
    length: int
    layout: str

    @property
    def places(self) -> list[slice]:
        """Of the real tokens."""
        starts = accumulate(self.padded, initial=0)
        return [slice(start, start + tokens) for start, tokens in zip(starts, self.real, strict=False)]

    def parameters(self) -> PackedSeqParams:
        """As Megatron hands them over."""
        real, padded = (
            torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device())
            for lengths in (self.real, self.padded)
        )
        longest = max(self.padded)
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=real,
            cu_seqlens_kv=real,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )

    def segments(self, layout: SequenceLayout) -> Segments:
        cumulative = [[0, *accumulate(lengths)] for lengths in (self.padded, self.real)]
        return packed_segments(layout, self.length, *cumulative, per_document=self.layout == "document")


def draw_packing(rng: random.Random, unit: int, layout: str, length: int) -> Packing:
    """Random documents, some of them empty, in ``length`` tokens, a multiple of ``unit`` (2*P*R, times TP under
    sequence parallelism). The per-document layout pads each document to such a multiple; the other at random."""
    real, padded, left = [], [], length
    while left > 0 and rng.random() < 0.9:
        tokens = rng.choice((rng.randint(0, left), rng.randint(0, min(9, left)), left))
        place = -(-tokens // unit) * unit if layout == "document" else rng.randint(tokens, min(left, tokens + 3))
        real.append(tokens)
        padded.append(place)
        left -= place
    if not any(real):
        return Packing((length - 1,), (length,), length, layout)
    return Packing(tuple(real), tuple(padded), length, layout)


def compare_packed(
    case: Case,
    packing: Packing,
    p: int,
    r: int,
    groups: ProcessGroupCollection,
    tp: int = 1,
    sp: bool = False,
    padding: float = 100.0,
) -> dict[str, float]:
    """Relative errors as of ``parity.compare``; what padding holds, ``padding`` times noise, reaches none of them.

    With NaN as ``padding`` weight gradients are left out: products over all tokens multiply it by 0. Collective.
    """
    stock = stock_attention(case, groups)
    upipe = upipe_attention(case, p, r, stock, tp, sp)
    inputs = _inputs(case, packing, padding)
    wanted = _by_documents(stock, packing, *inputs)
    tokens = _tokens(packing, SequenceLayout(p, r))
    if sp:
        tokens = tokens.chunk(tp)[parallel_state.get_tensor_model_parallel_rank()]
    found = _packed(upipe, packing, tokens, *inputs)
    poisoned = math.isnan(padding)
    seen = _real(packing)[tokens] if poisoned else torch.ones_like(tokens, dtype=torch.bool)
    errors = {name: _error(found[name][seen], wanted[name][tokens][seen], wanted[name]) for name in ("output", "dx")}
    if not poisoned:
        for name in sorted(wanted.keys() - errors.keys()):  # the same order on all ranks
            want, gradient = tp_shard(name, wanted[name], tp), finalized(name, found[name])
            # of norms it is 0 where every query sees one key
            errors[name] = relative_error(gradient, want) if want.any() else gradient.abs().max().item()
    return errors


def compare_packed_low_precision(
    case: Case, packing: Packing, p: int, r: int, groups: ProcessGroupCollection, dtype: torch.dtype = torch.bfloat16
) -> dict[str, tuple[float, float]]:
    """For output and dx (error of UPipe, error of stock), both in ``dtype``, against stock in fp64, in the 2-norm.

    Collective.
    """
    exact = stock_attention(case, groups)
    with torch.no_grad():  # weights that the low precision holds exactly
        for parameter in exact.parameters():
            parameter.copy_(parameter.to(dtype))
    plain, upipe = stock_attention(case, groups), upipe_attention(case, p, r, exact).to(dtype)
    plain.load_state_dict(exact.state_dict())
    x, dy, table = _inputs(case, packing, 0.0)
    low = x.to(dtype), dy.to(dtype), table
    wanted = _by_documents(exact, packing, *(t.double() for t in low[:2]), table)
    stock = _by_documents(plain.to(dtype), packing, *low)
    tokens = _tokens(packing, SequenceLayout(p, r))
    found = _packed(upipe, packing, tokens, *low)
    errors = {}
    for name in ("output", "dx"):
        want = wanted[name][tokens]
        errors[name] = tuple((t.double() - want).norm().item() for t in (found[name], stock[name][tokens]))
    return errors


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _inputs(case: Case, packing: Packing, padding: float) -> Inputs:
    """x and dy [S, 1, hidden] in fp64, and the RoPE table of one document; the same on every rank."""
    generator = torch.Generator().manual_seed(13)
    shape = (packing.length, 1, case.hidden)
    x, dy = (torch.randn(shape, dtype=torch.float64, generator=generator).to(device()) for _ in range(2))
    for tensor in (x, dy):
        tensor[~_real(packing)] *= padding
    return x, dy, rotary_table(case, max(packing.padded))


def _real(packing: Packing) -> torch.Tensor:
    """bool [S]: which tokens are no padding."""
    real = torch.zeros(packing.length, dtype=torch.bool, device=device())
    for place in packing.places:
        real[place] = True
    return real


def _tokens(packing: Packing, layout: SequenceLayout) -> torch.Tensor:
    """int64 [s]: those of this context-parallel rank."""
    if layout.size == 1:
        return torch.arange(packing.length, device=device())
    shard = packing.segments(layout).shard(parallel_state.get_context_parallel_rank())
    return torch.tensor([i for half in shard for i in half], device=device())


def _by_documents(
    stock: torch.nn.Module, packing: Packing, x: torch.Tensor, dy: torch.Tensor, table: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Output, dx and weight gradients of the stock module, one document at a time; 0 at padding."""
    x, output = x.clone().requires_grad_(), torch.zeros_like(x)
    for place in packing.places:
        if place.stop > place.start:
            out, _ = stock(x[place], None, rotary_pos_emb=table[: place.stop - place.start])
            out.backward(dy[place])
            output[place] = out.detach()
    return {"output": output, "dx": x.grad, **_gradients(stock)}


def _packed(
    upipe: torch.nn.Module,
    packing: Packing,
    tokens: torch.Tensor,
    x: torch.Tensor,
    dy: torch.Tensor,
    table: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """The same of UPipe, for this rank's tokens. Collective."""
    shard = x[tokens].requires_grad_()
    output, _ = upipe(shard, None, rotary_pos_emb=table, packed_seq_params=packing.parameters())
    output.backward(dy[tokens])
    return {"output": output.detach(), "dx": shard.grad, **_gradients(upipe)}


def _gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def _error(found: torch.Tensor, wanted: torch.Tensor, whole: torch.Tensor) -> float:
    """Relative to the largest of the whole tensor: a shard may hold nothing but padding."""
    if not torch.isfinite(found).all():
        return math.inf
    largest = whole.nan_to_num().abs().max()
    return ((found - wanted).abs().max() / largest).item() if found.numel() else 0.0
