"""Random legal grids of parallelism and model settings. Pure; no torch.distributed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron_upipe.attention.schedule import legal_heads_per_stage
from megatron_upipe.checks import check_parallelism
from megatron_upipe.errors import UPipeError

WORLD = 8


@dataclass(frozen=True)
class Grid:
    """One composition; tp * p * r * pp * dp is the world's size."""

    tp: int
    p: int
    r: int
    pp: int
    dp: int
    virtual: bool  # two model chunks on each pipeline stage
    sequence_parallel: bool
    heads: int
    kv_heads: int
    heads_per_stage: int
    head_dim: int
    hidden: int
    chunk: int  # tokens of half a context-parallel shard
    micro_batch: int
    micro_batches: int
    bias: bool
    qkv_bias: bool
    qk_layernorm: bool
    gate: bool
    layer_norm: bool
    tied: bool
    interleaved: bool
    fuse: bool
    distributed_optimizer: bool
    overlap: bool
    frozen: bool  # linear_qkv of the first layer is
    activation: str  # swiglu, gelu, squared relu
    keep_attention: int | None
    offload: str
    prefetch: str
    checkpoint_every: int
    mlp_tile_tokens: int
    loss_tile_tokens: int
    layers_per_chunk: int
    seed: int
    precision: str = "fp32"  # in fp64 and bf16 gradients only
    window: int | None = None
    sinks: str = "vanilla"
    documents: str | None = None  # layout of packed ones
    experts: int = 0  # with them every second layer, from the first on, is a mixture of two
    hybrid: str | None = None  # pattern of a hybrid model's layers; | between pipeline stages

    @property
    def world(self) -> int:
        return self.tp * self.p * self.r * self.pp * self.dp

    @property
    def length(self) -> int:
        return 2 * self.p * self.r * self.chunk

    @property
    def layers(self) -> int:
        if self.hybrid is not None:
            return len(self.hybrid.replace("|", ""))
        return self.layers_per_chunk * self.pp * (2 if self.virtual else 1)

    def lengths(self, step: int, dp_rank: int, index: int) -> list[int] | None:
        """Of the documents of a micro-batch."""
        if self.documents is None:
            return None
        rng = random.Random(f"{self.seed} {step} {dp_rank} {index}")
        unit = 2 * self.p * self.r if self.documents == "document" else 1
        cuts = sorted(rng.choices(range(self.length // unit + 1), k=rng.randint(1, 4)))
        ends = [0, *(cut * unit for cut in cuts), self.length]
        return [b - a for a, b in pairwise(ends) if b > a]


def draw(seed: int) -> Grid:
    """The grid of a seed; the same on every machine."""
    rng = random.Random(seed)
    while True:
        tp, p, r, pp = (rng.choice(sizes) for sizes in ((1, 1, 2, 4), (1, 2, 4), (1, 1, 2, 4), (1, 1, 2)))
        if p * r == 1 or WORLD % (tp * p * r * pp):
            continue
        kv_heads = tp * rng.choice((1, 2, 4))
        heads = kv_heads * rng.choice((1, 2, 3, 4, 8))
        legal = legal_heads_per_stage(heads // tp, kv_heads // tp, p)
        if not legal:
            continue
        sequence_parallel = tp > 1 and rng.random() < 0.6
        grid = Grid(
            tp=tp,
            p=p,
            r=r,
            pp=pp,
            dp=WORLD // (tp * p * r * pp),
            virtual=pp > 1 and rng.random() < 0.4,
            sequence_parallel=sequence_parallel,
            heads=heads,
            kv_heads=kv_heads,
            heads_per_stage=rng.choice(legal),
            head_dim=rng.choice((4, 6, 10)),
            hidden=24,
            chunk=rng.choice((1, 3, 5)) * (tp if sequence_parallel else 1),
            micro_batch=rng.choice((1, 2, 3)),
            micro_batches=2,
            bias=rng.random() < 0.3,
            qkv_bias=rng.random() < 0.4,
            qk_layernorm=rng.random() < 0.4,
            gate=rng.random() < 0.3,
            layer_norm=rng.random() < 0.3,
            tied=rng.random() < 0.4,
            interleaved=rng.random() < 0.3,
            fuse=rng.random() < 0.5,
            distributed_optimizer=rng.random() < 0.6,
            overlap=rng.random() < 0.5,
            frozen=rng.random() < 0.2,
            activation=rng.choice(("swiglu", "swiglu", "gelu", "squared relu")),
            keep_attention=rng.choice((None, 0, 1)),
            offload=rng.choice(("none", "host")),
            prefetch=rng.choice(("off", "on")),
            checkpoint_every=rng.choice((1, 1, 2)),
            mlp_tile_tokens=rng.choice((1, 7, 20, 4096)),
            loss_tile_tokens=rng.choice((0, 1, 9, 1024)),
            layers_per_chunk=2 if pp == 1 else rng.choice((1, 2)),
            seed=seed,
        )
        try:
            check_parallelism(
                query_heads=heads,
                kv_heads=kv_heads,
                tensor_parallel_size=tp,
                context_parallel_size=p * r,
                hierarchical_sizes=[p, r],
                heads_per_stage=grid.heads_per_stage,
                sequence_length=grid.length,
                sequence_parallel=sequence_parallel,
            )
        except UPipeError:
            continue
        return _with_masks(grid)


def _with_masks(grid: Grid) -> Grid:
    """In half of the grids each a window, sinks, packed documents."""
    rng = random.Random(f"masks {grid.seed}")
    grid = replace(
        grid,
        window=rng.choice((None, None, 2, 9)),
        sinks=rng.choice(("vanilla", "vanilla", "learnable", "off-by-one")),
        documents=rng.choice((None, None, "document", "sequence")),
    )
    return grid if grid.documents is None else replace(grid, micro_batch=1)
