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
    layout = SequenceLayout(p, r)
    stock = stock_attention(case, groups)
    upipe = upipe_attention(case, p, r, stock, tp, sp)
    generator = torch.Generator().manual_seed(13)
    shape = (packing.length, 1, case.hidden)
    x, dy = (torch.randn(shape, dtype=torch.float64, generator=generator).to(device()) for _ in range(2))
    real = torch.zeros(packing.length, dtype=torch.bool, device=device())
    for place in packing.places:
        real[place] = True
    x[~real] *= padding
    dy[~real] *= padding
    segments = packing.segments(layout)
    tokens = torch.tensor([i for half in segments.shard(parallel_state.get_context_parallel_rank()) for i in half])
    tokens = tokens.to(device())
    if sp:
        tokens = tokens.chunk(tp)[parallel_state.get_tensor_model_parallel_rank()]

    table = rotary_table(case, max(packing.padded))
    whole = x.clone().requires_grad_()
    wanted = torch.zeros_like(x)
    for place in packing.places:
        if place.stop > place.start:
            out, _ = stock(whole[place], None, rotary_pos_emb=table[: place.stop - place.start])
            out.backward(dy[place])
            wanted[place] = out.detach()
    shard = x[tokens].requires_grad_()
    found, _ = upipe(shard, None, rotary_pos_emb=table, packed_seq_params=packing.parameters())
    found.backward(dy[tokens])

    poisoned = math.isnan(padding)
    seen = real[tokens] if poisoned else torch.ones_like(real[tokens])
    errors = {
        "output": _error(found.detach()[seen], wanted[tokens][seen], wanted),
        "dx": _error(shard.grad[seen], whole.grad[tokens][seen], whole.grad),
    }
    if poisoned:
        return errors
    gradients = dict(upipe.named_parameters())
    for name, parameter in stock.named_parameters():
        if parameter.grad is not None:
            errors[name] = relative_error(finalized(name, gradients[name].grad), tp_shard(name, parameter.grad, tp))
    return errors


def _error(found: torch.Tensor, wanted: torch.Tensor, whole: torch.Tensor) -> float:
    """Relative to the largest of the whole tensor: a shard may hold nothing but padding."""
    if not torch.isfinite(found).all():
        return math.inf
    largest = whole.nan_to_num().abs().max()
    return ((found - wanted).abs().max() / largest).item() if found.numel() else 0.0
