"""The whole model under every policy of what waits for backward: losses and all gradients after finalize.

In fp64 equal to the stock model's on one rank; in bf16 at most twice its error.
"""

from dataclasses import replace

import pytest
from composition import runs
from composition.grids import draw
from composition.test_composition import check
from end_to_end.training import some_slow

TOLERANCE = 1e-10

# 20 tokens a rank in tiles of 3 and 4 of them (micro-batch 2); sizes pairwise different
BASE = replace(
    draw(0),
    precision="fp64",
    layers_per_chunk=2,
    **dict(tp=1, p=2, r=1, pp=1, dp=1, virtual=False, sequence_parallel=False),
    **dict(heads=12, kv_heads=4, heads_per_stage=2, head_dim=10, chunk=10, micro_batch=2, micro_batches=2),
    **dict(bias=False, qkv_bias=True, qk_layernorm=True, gate=False, layer_norm=False, tied=False, interleaved=False),
    **dict(fuse=False, distributed_optimizer=False, overlap=False, frozen=False, activation="swiglu"),
    **dict(keep_attention=None, offload="none", prefetch="off", checkpoint_every=1),
    **dict(mlp_tile_tokens=7, loss_tile_tokens=9, window=None, sinks="vanilla", documents=None),
)
PARALLEL = {
    "context 2": {},
    "ring 2": dict(p=1, r=2, heads_per_stage=3),
    "TP 2 + sequence parallel": dict(tp=2, sequence_parallel=True, mlp_tile_tokens=12),
    "TP 2": dict(tp=2),
    "PP 2, 4 micro-batches": dict(pp=2, micro_batches=4),
    "interleaved PP 2, 4 micro-batches": dict(pp=2, virtual=True, micro_batches=4),
}
POLICIES = {
    "keep": {},
    "input": dict(keep_attention=0),
    "keep one": dict(keep_attention=1),
    "keep on host": dict(offload="host"),
    "input on host": dict(keep_attention=0, offload="host", prefetch="on"),
    "every 2": dict(checkpoint_every=2, keep_attention=0),
    "every 2, kept, on host": dict(checkpoint_every=2, offload="host"),
}


EVERYWHERE = ["keep", "input on host", "every 2, kept, on host"]
SOMEWHERE = [
    (layout, policy) for layout in ("TP 2 + sequence parallel", "PP 2, 4 micro-batches") for policy in POLICIES
]
PAIRS = [("context 2", policy) for policy in POLICIES] + SOMEWHERE


@pytest.mark.parametrize(("parallel", "policy"), some_slow(PAIRS, *(p for p in SOMEWHERE if p[1] not in EVERYWHERE)))
def test_every_policy(workers, parallel, policy):
    check(workers, replace(BASE, **PARALLEL[parallel], **POLICIES[policy]), TOLERANCE)


@pytest.mark.parametrize("parallel", ["ring 2", "TP 2", "interleaved PP 2, 4 micro-batches"])
def test_every_layout(workers, parallel):
    check(workers, replace(BASE, **PARALLEL[parallel], offload="host", prefetch="on", checkpoint_every=2), TOLERANCE)


MODELS = {
    "GELU with biases": dict(activation="gelu", bias=True, layer_norm=True),
    "squared ReLU, tied": dict(activation="squared relu", tied=True),
    "output gates": dict(gate=True),
    "tied on two pipeline stages": dict(tied=True, pp=2),
    "tied, TP 2 + sequence parallel": dict(tied=True, tp=2, sequence_parallel=True),
    "gates, TP 2 + sequence parallel, biases": dict(gate=True, bias=True, tp=2, sequence_parallel=True),
    "fused gradients": dict(fuse=True, bias=True),
    "one tile": dict(mlp_tile_tokens=4096, loss_tile_tokens=4096),
    "one row a tile": dict(mlp_tile_tokens=1, loss_tile_tokens=1),
    "data parallel 2, distributed optimizer, overlapped": dict(dp=2, distributed_optimizer=True, overlap=True),
}


@pytest.mark.parametrize("model", MODELS)
def test_models(workers, model):
    # Megatron takes the sigmoid of output gates in fp32
    tolerance = 1e-7 if MODELS[model].get("gate") else TOLERANCE
    check(workers, replace(BASE, keep_attention=1, **MODELS[model]), tolerance)


def _bf16_errors(rank, grid, exact, stock):
    """parameter -> (squared error of ours, of stock), summed over this rank's part."""
    ours = runs.sharded_gradients(grid, exact.initial)
    return {
        name: (
            (gradient.double() - runs.shard(name, exact.gradients[name], grid)).square().sum().item(),
            runs.shard(name, stock.gradients[name].double() - exact.gradients[name], grid).square().sum().item(),
        )
        for name, gradient in ours.items()
    }


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(keep_attention=1, offload="host", prefetch="on", checkpoint_every=2),
        dict(tp=2, sequence_parallel=True, keep_attention=0, mlp_tile_tokens=12),
        dict(pp=2, micro_batches=4, offload="host", fuse=True),
    ],
)
def test_bf16_errs_twice_as_much_as_stock_at_most(workers, changes):
    """2-norm over each parameter's gradient, with all ranks' shares; stock in bf16 on one rank."""
    # q/k norms err as much as stock with flash attention, which this stock run has not (docs/correctness.md)
    settings = dict(chunk=32, hidden=48, qk_layernorm=False, mlp_tile_tokens=20, loss_tile_tokens=20)
    exact_grid = replace(BASE, **{**settings, **changes})
    grid = replace(exact_grid, precision="bf16")
    stock = workers.run(1, runs.reference, grid)[0]
    exact = workers.run(1, runs.reference, exact_grid, stock.initial)[0]  # weights that bf16 holds exactly
    found = workers.run(grid.world, _bf16_errors, grid, exact, stock)
    for name in exact.gradients:
        pairs = [errors[name] for errors in found if name in errors]
        ours, theirs = (sum(pair[i] for pair in pairs) ** 0.5 for i in range(2))
        assert 0 < ours <= 2 * theirs, (name, ours, theirs)
