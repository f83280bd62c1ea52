"""Views of tensors by stage: which rows, columns and heads belong to a stage. Pure index logic on strides.

Every function takes the whole tensor and returns a view of the part of one stage (or one KV block), so that the same
function serves reading and writing. Heads come rank-major, as the exchange wants them.
"""

from __future__ import annotations

from torch import Tensor

from megatron_upipe.attention.schedule import HeadSchedule, Stage


def query_heads(heads: Tensor, schedule: HeadSchedule, stage: Stage, axis: int) -> Tensor:
    """``[..., H, ...]`` -> view ``[..., P, c, m', ...]`` of the stage's query heads along ``axis``."""
    grid = heads.unflatten(axis, schedule.grid)  # block, c, rank, stage, m'
    part = grid.select(axis + 3, stage.index).select(axis, stage.block)  # c, rank, m'
    return part.transpose(axis, axis + 1)


def query_rows(qkv: Tensor, schedule: HeadSchedule, stage: Stage, head_dim: int, part: int = 0) -> Tensor:
    """Rows of ``linear_qkv``'s weight or bias that project the stage's queries (``part`` 0) or output gates (1).

    For each KV head the rows are ``[q x g | k | v]``, with output gates ``[q x g | gate x g | k | v]``. Returns a view
    ``[P/copies, copies, c, m', d, ...]``.
    """
    blocks, c, ranks, per_block, width = schedule.grid
    g = schedule.queries_per_kv
    queries = _by_kv_head(qkv, schedule, head_dim)[:, part * g : (part + 1) * g]  # [K, g, d, ...]
    grid = queries.unflatten(1, (schedule.copies, per_block, width)).unflatten(0, (blocks, c, ranks // schedule.copies))
    # [c, P/copies, copies, m', d, ...] of the stage
    return grid[stage.block].select(3, stage.index).movedim(0, 2)


def key_value_rows(qkv: Tensor, schedule: HeadSchedule, block: int, head_dim: int) -> Tensor:
    """Rows that project the block's K and V: view ``[P/copies, 2, c, d, ...]``, keys before values."""
    blocks, c, ranks, _, _ = schedule.grid
    pairs = _by_kv_head(qkv, schedule, head_dim)[:, -2:]  # [K, 2, d, ...]
    return pairs.unflatten(0, (blocks, c, ranks // schedule.copies))[block].movedim(0, 2)


def projection_columns(weight: Tensor, schedule: HeadSchedule, stage: Stage, head_dim: int) -> Tensor:
    """Columns of ``linear_proj.weight`` [hidden, H*d] that take the stage's heads: view ``[hidden, P, c, m', d]``."""
    return query_heads(weight.unflatten(1, (schedule.query_heads, head_dim)), schedule, stage, axis=1)


def _by_kv_head(qkv: Tensor, schedule: HeadSchedule, head_dim: int) -> Tensor:
    return qkv.unflatten(0, (schedule.kv_heads, -1, head_dim))
