"""What ``methods.py`` and ``scaling.py`` compare: attention blocks and whole layers by several methods, same weights.

An attention block is x -> linear_qkv -> causal attention -> linear_proj, without norm and RoPE, for everybody.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import peers
import torch
import torch.distributed as dist
import torch.nn.functional as F
from attention_peak import make_groups, same
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_upipe.attention.function import AttentionCall, UPipeAttentionFunction
from megatron_upipe.attention.plan import AttentionParameters, AttentionPlan, Elementwise
from megatron_upipe.attention.schedule import head_schedule
from megatron_upipe.context.groups import ContextGroups
from megatron_upipe.context.segments import one_document
from megatron_upipe.errors import UPipeError
from megatron_upipe.integration.selftest.layers import SWIGLU
from megatron_upipe.integration.selftest.parity import Case, initialize, make_config
from megatron_upipe.kernels.select import select_kernel
from megatron_upipe.layer_specs import upipe_layer_spec

ULYSSES = "ulysses"


@dataclass(frozen=True)
class Sizes:
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    dtype: torch.dtype
    device: torch.device

    def attention_share(self, tokens: int, ffn: float = 0.0) -> float:
        """Of the FLOPs of a step without recomputation, with an MLP of ``ffn`` times hidden: 7 half products of
        tokens x tokens for attention, 3 products for each linear."""
        attention = 7 * tokens * self.heads * self.head_dim / 2
        linears = 3 * ((2 * self.heads + 2 * self.kv_heads) * self.head_dim + 3 * ffn * self.hidden) * self.hidden
        return attention / (attention + linears)


@dataclass(frozen=True)
class Candidate:
    """``run`` takes this rank's tokens [s, 1, hidden]; ``positions`` says which they are of the whole sequence.
    Collective. ``weights`` get gradients."""

    name: str
    run: Callable[[Tensor], Tensor]
    positions: Callable[[int], Tensor]
    weights: list[Tensor]
    note: str = ""


def block_candidates(sizes: Sizes, names: list[str]) -> list[Candidate]:
    """Attention blocks; ``NAME+overlap``, and ``NAME+recompute`` under torch's checkpointing. What is not installed or
    does not suit the ranks is left out, with a line on stderr. Collective."""
    torch.manual_seed(0)
    rows = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    made = (
        torch.randn(rows, sizes.hidden, dtype=torch.float64),
        torch.randn(sizes.hidden, sizes.heads * sizes.head_dim, dtype=torch.float64),
    )
    weights = [(w / w.shape[1] ** 0.5).to(sizes.device, sizes.dtype).requires_grad_() for w in made]
    found = []
    for name in names:
        method, *extras = name.split("+")
        try:
            if not set(extras) <= ({"recompute"} if method in peers.NAMES else {"recompute", "overlap"}):
                raise ValueError("+recompute is known, and of this package's own methods +overlap")
            if method in peers.NAMES:
                (peer,) = peers.peers([method], sizes.heads, sizes.kv_heads, sizes.device.type)
                one = _of_peer(peer, sizes, weights)
            else:
                one = _of_upipe(method, sizes, weights, "overlap" in extras)
        except (ImportError, ValueError, UPipeError) as error:
            if dist.get_rank() == 0:
                print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        run = one.run
        if "recompute" in extras:
            run = _checkpointed(one.run)
        found.append(replace(one, name=name, run=run))
    return found


def _checkpointed(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(run, x, use_reentrant=False)


METHODS = ("ring", ULYSSES, "usp", "upipe", "upipe-2p")


def _of_upipe(method: str, sizes: Sizes, weights: list[Tensor], overlap: bool) -> Candidate:
    """By this package: UPipe with U = P or 2P, and what it is at its ends: Ulysses (U = H), the ring (P = 1), USP."""
    world = dist.get_world_size()
    if method not in METHODS:
        raise ValueError(f"there are {', '.join((*METHODS, *peers.NAMES))}")
    p = {"ring": 1, "usp": world // 2}.get(method, world)
    if method == "usp" and (p < 2 or world % 2):
        raise ValueError(f"USP needs an even number of ranks, at least 4, not {world}")
    u = {"upipe": p, "upipe-2p": 2 * p}.get(method, sizes.heads)
    groups = _groups(p, world // p)
    layout = groups.layout
    plan = AttentionPlan(
        schedule=head_schedule(sizes.heads, sizes.kv_heads, p, u),
        groups=groups,
        kernel=select_kernel(sizes.device, sizes.dtype, sizes.head_dim),
        head_dim=sizes.head_dim,
        scale=sizes.head_dim**-0.5,
        causal=True,
        overlap=overlap,
    )
    parameters = AttentionParameters(weights[0], None, weights[1])

    def run(x: Tensor) -> Tensor:
        call = AttentionCall(
            plan=plan,
            elementwise=Elementwise(same, same, linear=True),
            parameters=lambda: parameters,
            gather=same,
            reduce=same,
            segments=one_document(layout, x.shape[0] * layout.size),
        )
        return UPipeAttentionFunction.apply(True, call, x, *parameters)

    return Candidate(method, run, lambda tokens: _zigzag(groups, tokens), weights)


_made_groups: dict[tuple[int, int], ContextGroups] = {}


def _groups(p: int, r: int) -> ContextGroups:
    if (p, r) not in _made_groups:
        _made_groups[p, r] = make_groups(p, r)
    return _made_groups[p, r]


def _zigzag(groups: ContextGroups, tokens: int) -> Tensor:
    return torch.cat([torch.arange(h.start, h.stop) for h in groups.layout.positions(groups.rank, tokens)])


def _of_peer(peer: peers.Peer, sizes: Sizes, weights: list[Tensor]) -> Candidate:
    world, rank = dist.get_world_size(), dist.get_rank()
    qkv, proj = weights
    g = sizes.heads // sizes.kv_heads

    def run(x: Tensor) -> Tensor:
        rows = F.linear(x, qkv).unflatten(2, (sizes.kv_heads, g + 2, sizes.head_dim))
        q, k, v = rows[:, :, :, :g].flatten(2, 3), rows[:, :, :, g].contiguous(), rows[:, :, :, g + 1].contiguous()
        return F.linear(peer.attend(q, k, v).flatten(2), proj)

    return Candidate(peer.name, run, lambda tokens: peer.order(tokens, world).chunk(world)[rank], weights, peer.note)


LAYERS: dict[str, dict] = {
    "ulysses+recompute": dict(keep_attention=0),
    "ulysses+keep": dict(),
    "upipe+recompute": dict(keep_attention=0),
    "upipe+keep": dict(),
    "upipe+recompute+overlap": dict(keep_attention=0, overlap="on"),
    "upipe+keep+overlap": dict(overlap="on"),
}
FFN = 3.5


def layer_candidates(sizes: Sizes, names: list[str]) -> list[Candidate]:
    """Whole transformer layers of this package, P the world. Collective, once."""
    world = dist.get_world_size()
    initialize(world, 1)
    groups, context = ProcessGroupCollection.use_mpu_process_groups(), _groups(world, 1)
    found = []
    for name in names:
        case = Case(
            sizes.heads,
            sizes.kv_heads,
            sizes.heads if name.startswith(ULYSSES) else None,
            head_dim=sizes.head_dim,
            hidden=sizes.hidden,
            config=SWIGLU,
            upipe=LAYERS[name],
        )
        config = make_config(case, world, 1, ffn_hidden_size=int(FFN * sizes.hidden), params_dtype=sizes.dtype)
        torch.manual_seed(0)
        layer = build_module(upipe_layer_spec, config=config, layer_number=1, pg_collection=groups).to(sizes.device)
        found.append(
            Candidate(
                name,
                lambda x, layer=layer: layer(x, None)[0],
                lambda tokens: _zigzag(context, tokens),
                list(layer.parameters()),
            )
        )
    return found
