"""Head schedule: who computes which head in which stage. Pure index logic, no torch.

Query head q uses KV head q // g. A *stage* computes U = m*P query heads, m on each Ulysses rank; the KV heads that its
ranks need are exchanged once and kept for all stages of the same *KV block*.

Heads are numbered along a grid of five axes ``(block, c, rank, stage, m')``, row-major; a stage is the heads with one
block and one stage index, and a rank computes those with its rank index (c rows of m' heads, m = c*m'):

* K % P == 0, m divides g: KV block j holds KV heads j*P..j*P+P-1, one for each rank; g/m stages each.
  grid (K/P, 1, P, g/m, m)
* K % P == 0, m = c*g: a stage holds c whole KV heads of each rank. grid (K/P/c, c, P, 1, g)
* P % K == 0, P > K: each KV head goes to P/K ranks, which split its query heads. grid (1, 1, P, H/P/m, m)

Source: arXiv 2602.21196, section on GQA scheduling; unlike the authors' code, weights keep their order.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_upipe.errors import UPipeError


@dataclass(frozen=True)
class Stage:
    """One step: which heads, and whether its KV block begins or ends with it."""

    block: int
    index: int  # within the block
    begins_block: bool
    ends_block: bool


@dataclass(frozen=True)
class HeadSchedule:
    """Stages of one layer on one tensor-parallel rank. Build it with ``head_schedule``."""

    query_heads: int  # H
    kv_heads: int  # K
    ulysses_size: int  # P
    heads_per_stage: int  # U
    grid: tuple[int, int, int, int, int]  # (block, c, rank, stage, m')

    @property
    def heads_per_rank(self) -> int:
        """m: query heads that a rank computes in a stage."""
        return self.heads_per_stage // self.ulysses_size

    @property
    def queries_per_kv(self) -> int:
        """g."""
        return self.query_heads // self.kv_heads

    @property
    def copies(self) -> int:
        """On how many ranks each KV head is attended: 1, or P/K."""
        return max(1, self.ulysses_size // self.kv_heads)

    @property
    def kv_per_rank(self) -> int:
        """c: KV heads that a rank holds in a block."""
        return self.grid[1]

    @property
    def stages_per_block(self) -> int:
        return self.grid[3]

    @property
    def stages(self) -> list[Stage]:
        blocks, _, _, per_block, _ = self.grid
        return [Stage(j, t, t == 0, t == per_block - 1) for j in range(blocks) for t in range(per_block)]

    def queries(self, stage: Stage, rank: int) -> list[int]:
        """Query heads that Ulysses rank ``rank`` computes in ``stage``, in kernel order (c-major)."""
        _, c, ranks, per_block, width = self.grid
        first = [((stage.block * c + e) * ranks + rank) * per_block + stage.index for e in range(c)]
        return [f * width + i for f in first for i in range(width)]

    def keys(self, block: int, rank: int) -> list[int]:
        """KV heads that Ulysses rank ``rank`` attends in ``block``, in kernel order."""
        if self.copies > 1:
            return [rank // self.copies]
        c = self.kv_per_rank
        return [(block * c + e) * self.ulysses_size + rank for e in range(c)]


def legal_heads_per_stage(query_heads: int, kv_heads: int, ulysses_size: int) -> list[int]:
    """All U that can be scheduled, rising: P first (smallest stages), H last (plain Ulysses). Empty if none can."""
    h, k, p = query_heads, kv_heads, ulysses_size
    if h % k or h % p:
        return []
    g = h // k
    per_rank = h // p
    divisors = [m for m in range(1, per_rank + 1) if per_rank % m == 0]
    if k % p == 0:
        return [m * p for m in divisors if g % m == 0 or m % g == 0]
    if p % k == 0 and g % (p // k) == 0:
        return [m * p for m in divisors]
    return []


def fitting_ulysses_sizes(query_heads: int, kv_heads: int) -> list[int]:
    """All P for which there is a schedule, rising."""
    return [p for p in range(1, query_heads + 1) if legal_heads_per_stage(query_heads, kv_heads, p)]


def head_schedule(query_heads: int, kv_heads: int, ulysses_size: int, heads_per_stage: int | None) -> HeadSchedule:
    """The schedule for H, K, P and U (None: U = P).

    Raises UPipeError, naming the flag and the nearest legal value, when there is none.
    """
    h, k, p = query_heads, kv_heads, ulysses_size
    legal = legal_heads_per_stage(h, k, p)
    if not legal:
        raise UPipeError(
            f"ulysses_size P = {p} does not fit {h} query heads and {k} KV heads on a tensor-parallel rank; "
            f"fitting are {_listed(fitting_ulysses_sizes(h, k))}"
        )
    u = p if heads_per_stage is None else heads_per_stage
    if u not in legal:
        nearest = min(legal, key=lambda value: (abs(value - u), value))
        raise UPipeError(
            f"--upipe-heads-per-stage {u} is not possible with {h} query heads, {k} KV heads and ulysses_size {p}; "
            f"the nearest legal value is {nearest} (all: {_listed(legal)})"
        )
    g, m = h // k, u // p
    if k % p:
        grid = (1, 1, p, h // p // m, m)
    elif g % m == 0:
        grid = (k // p, 1, p, g // m, m)
    else:
        c = m // g
        grid = (k // p // c, c, p, 1, g)
    return HeadSchedule(h, k, p, u, grid)


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values))
