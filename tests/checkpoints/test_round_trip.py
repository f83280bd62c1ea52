"""torch_dist checkpoints between the stock spec and UPipe, both ways, across P x R and TP: weights bit-equal."""

from dataclasses import replace

import torch
from composition import runs
from composition.grids import Grid, draw
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

GRID = replace(
    draw(0),
    heads=8,
    kv_heads=4,
    heads_per_stage=4,
    chunk=2,
    pp=1,
    virtual=False,
    frozen=False,
    bias=True,
    qkv_bias=True,
)

# (ranks, layout, UPipe): each loads what the one before it saved
CHAIN = [
    (1, dict(tp=1, p=1, r=1, dp=1), False),
    (4, dict(tp=1, p=2, r=2, dp=1), True),
    (2, dict(tp=2, p=1, r=1, dp=1), False),
    (8, dict(tp=2, p=2, r=1, dp=2), True),
    (4, dict(tp=1, p=4, r=1, dp=1), True),
    (1, dict(tp=1, p=1, r=1, dp=1), False),
]


def _model(grid: Grid, upipe: bool) -> torch.nn.Module:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=grid.tp,
        context_parallel_size=grid.p * grid.r,
        hierarchical_context_parallel_sizes=[grid.p, grid.r] if grid.p * grid.r > 1 else None,
    )
    model_parallel_cuda_manual_seed(5)
    return runs._models(grid, upipe=True, stock_spec=not upipe)[0]


def _hop(rank, grid, upipe, load, save, initial):
    """Loads, compares with ``initial`` bit for bit, saves; returns the keys of the checkpoint and the weights."""
    model = _model(grid, upipe)
    names = runs._global_names(model, grid)
    if load is None:
        runs._prepare(model, names, grid, None)
        initial = {name: p.detach().clone() for p, name in names.items()}
    else:
        before = [p.detach().clone() for p in names]
        state = dist_checkpointing.load(model.sharded_state_dict(), load)
        model.load_state_dict(state)
        assert not any(torch.equal(b, p) for b, p in zip(before, names, strict=True)), "it started from other weights"
        for parameter, name in names.items():
            assert torch.equal(parameter, runs.shard(name, initial[name], grid)), name
    dist_checkpointing.save(model.sharded_state_dict(), save)
    return initial


def test_stock_and_upipe_exchange_checkpoints(workers, tmp_path):
    load, initial = None, None
    for hop, (ranks, layout, upipe) in enumerate(CHAIN):
        save = str(tmp_path / f"checkpoint{hop}")
        (tmp_path / f"checkpoint{hop}").mkdir()
        grid = replace(GRID, **layout, sequence_parallel=layout["tp"] > 1, seed=hop)
        initial = workers.run(ranks, _hop, grid, upipe, load, save, initial)[0]
        load = save
    keys = set(dist_checkpointing.load_tensors_metadata(load)) if load else set()
    assert "decoder.layers.self_attention.linear_qkv.layer_norm_weight" in keys, "TransformerEngine's name of the norm"
    assert not [key for key in keys if "input_layernorm" in key]
