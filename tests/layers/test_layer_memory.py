"""Measured live bytes: of a layer by phase, of the loss, of pipeline stages with several micro-batches in flight."""

from dataclasses import replace
from types import SimpleNamespace

import layer_peak
import pytest
import torch
from composition import runs
from composition.test_policies import BASE
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_upipe.integration.host_memory import host_store_bytes
from megatron_upipe.layers.loss import LossCall, TiledLossFunction
from megatron_upipe.layers.tiles import Tiles
from megatron_upipe.memory.host_store import host_store
from megatron_upipe.planning.live_bytes import LiveBytes
from megatron_upipe.precision import plain

TOKENS, TILE = 512, 16
STAGE = 4 / layer_peak.HEADS  # of u1: a tensor of one stage with U = P = 4
# with 16 stages: a stage's rows of weights in small copies, wide as the model, beside 512 tokens
WEIGHTS = 0.5
# activations of a tile in forward and backward: z, its halves and gradients, and a dozen of the hidden size
TILE_U1 = (6 * 2 * layer_peak.FFN / layer_peak.HIDDEN + 12) * TILE / TOKENS


def _peaks(rank, policy, heads=layer_peak.HEADS, dtype=torch.float32):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "BLOCK", TILE)  # as small beside the tokens as it is at scale
        return layer_peak.layer_peaks(policy, TOKENS, TILE, ranks=4, heads=heads, dtype=dtype)


@pytest.mark.parametrize("policy", ["keep, on the device", "input, on the host"])
def test_peak_of_each_phase(workers, policy):
    """x, dy, dx are full size, with the store on the device also out; the rest are buffers of a stage or a tile."""
    full = 3 if "host" in policy else 4
    for peaks in workers.run(4, _peaks, layer_peak.POLICIES[policy]):
        assert full < peaks["attention backward"] <= full + 13 * STAGE, peaks
        assert 2 < peaks["attention forward"] <= 2 + 13 * STAGE, peaks
        assert full - 1 < peaks["MLP backward"] <= 3 + TILE_U1, peaks
        assert 3 < peaks["MLP forward"] <= 3 + TILE_U1, peaks


@pytest.mark.slow
def test_peak_in_bf16_with_many_stages(workers):
    """16 stages: dx is summed in fp32, one u1 more and no other."""
    policy = layer_peak.POLICIES["input, on the host"]
    for peaks in workers.run(4, _peaks, policy, 64, torch.bfloat16):
        assert 4 < peaks["attention backward"] <= 4 + 13 * STAGE / 2 + WEIGHTS, peaks


def _loss_peak(tokens, vocabulary, tile):
    hidden = torch.randn(tokens, 2, 16, requires_grad=True)
    weight = torch.randn(vocabulary, 16)
    labels = torch.randint(vocabulary, (tokens, 2))
    call = LossCall(
        tiles=Tiles.of(tokens, tile, 2),
        logits=lambda rows: rows @ weight.t(),
        weight=lambda: weight,
        gather=lambda t: t,
        reduce_input=lambda t: t,
        group=None,
        first=0,
        scale=1.0,
        fuse=False,
    )
    with LiveBytes() as live:
        TiledLossFunction.apply(True, call, hidden, labels, weight).sum().backward()
    return live.peak


def test_loss_is_flat_in_vocabulary_times_tokens():
    """Beyond dhidden and two numbers a token, bytes are those of a tile."""
    tile, vocabulary = 32, 500
    small, large = (_loss_peak(tokens, vocabulary, tile) for tokens in (256, 2048))
    per_token = 2 * (16 + 6) * 4  # micro-batch 2: dhidden, losses, lse, their gradients
    assert large - small <= (2048 - 256) * per_token
    tile_bytes = tile * vocabulary * 4
    assert tile_bytes < small - 256 * 2 * 16 * 4 < 4 * tile_bytes
    assert large < 2048 * 2 * vocabulary * 4 / 4, "a quarter of the logits"


def _in_flight(rank, grid):
    """Device bytes of activations, in layer inputs, that this rank holds when each forward step begins."""
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2 if grid.virtual else None,
        context_parallel_size=2,
        hierarchical_context_parallel_sizes=[2, 1],
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(5)
    host_store.cache_clear()  # that of earlier cases in this process
    models = [model.train() for model in runs._models(grid, upipe=True)]
    held, modes = [], []

    def forward_step(*args):
        held.extend(mode.now for mode in modes)
        return runs._forward_step(grid, False, [], *args)

    def step():
        iterators = [runs._batches(grid, 0) for _ in models]
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(models) > 1 else iterators[0],
            model=models if len(models) > 1 else models[0],
            num_microbatches=grid.micro_batches,
            seq_length=grid.length,
            micro_batch_size=grid.micro_batch,
            forward_only=False,
        )

    step()  # makes gradients and host buffers
    store = host_store(torch.device("cpu"))
    buffers = store.buffers
    repeats, peaks = [], []
    for _ in range(3):  # the least: gloo's threads let go of messages a little late
        held.clear()
        with LiveBytes() as live:
            modes[:] = [live]
            step()
        repeats.append(list(held))
        peaks.append(live.peak)
    assert store.buffers == buffers, "no new ones after the first step"
    layer_input = grid.length // 2 * grid.micro_batch * grid.hidden * 8
    least = [min(values) / layer_input for values in zip(*repeats, strict=True)]
    return least, min(peaks) / layer_input, store.bytes, _expected_store_bytes(grid, models)


def _expected_store_bytes(grid, models):
    """What a user is told before the first step."""
    args = SimpleNamespace(
        global_batch_size=grid.micro_batch * grid.micro_batches,
        micro_batch_size=grid.micro_batch,
        data_parallel_size=1,
        microbatch_group_size_per_vp_stage=None,
        pipeline_model_parallel_size=grid.pp,
        seq_length=grid.length,
        context_parallel_size=2,
        hidden_size=grid.hidden,
        params_dtype=torch.float64,
        upipe_checkpoint_every=grid.checkpoint_every,
    )
    return host_store_bytes(args, models)


GRID = replace(BASE, pp=2, micro_batches=4, chunk=30, loss_tile_tokens=24, mlp_tile_tokens=24, layers_per_chunk=1)


@pytest.mark.slow
@pytest.mark.parametrize("virtual", [False, True])
def test_pipeline_stages_hold_what_the_schedule_explains(workers, virtual):
    """4 micro-batches: with the host store a forward pass in flight leaves less than one layer input on the device."""
    grid = replace(GRID, virtual=virtual)
    on_device = [held for held, *_ in workers.run(4, _in_flight, grid)]
    found = workers.run(4, _in_flight, replace(grid, offload="host"))
    on_host = [held for held, *_ in found]
    # one input received and one gradient sent; interleaved, for each of two chunks, and one each on the way
    messages = 6 if virtual else 2
    table = 0.3  # Megatron's RoPE table
    for rank in range(4):
        assert max(on_host[rank]) <= messages + table, (rank, on_host[rank])
    waits = 1 + (grid.heads * grid.head_dim + grid.heads) / grid.hidden  # of the one layer of a chunk: x, out, lse
    assert on_device[0][1] - on_host[0][1] == pytest.approx(waits), "the first stage after its first forward pass"
    in_flight = 4 if virtual else 1  # when a forward pass of the first stage begins in the steady state
    assert max(on_device[0]) - max(on_host[0]) >= in_flight * (waits - 1)
    for _, _, held, expected in found:
        assert held == expected, "the host store is as large as the user is told before the first step"


@pytest.mark.slow
def test_peak_does_not_grow_with_the_number_of_micro_batches(workers):
    grid = replace(GRID, offload="host", layers_per_chunk=2, checkpoint_every=2, keep_attention=1, chunk=8)
    four, *more = (workers.run(4, _in_flight, replace(grid, micro_batches=n)) for n in (4, 6))
    while len(more) < 4 and any(peak >= four[rank][1] + 2 for rank, peak in enumerate(_least_peaks(more))):
        more.append(workers.run(4, _in_flight, replace(grid, micro_batches=6)))  # gloo let go late: a better least
    for rank, peak in enumerate(_least_peaks(more)):
        assert peak < four[rank][1] + 2, "one layer input for each of 2 more micro-batches would be a leak"
        for _, _, held, expected in (four[rank], *(found[rank] for found in more)):
            assert held == expected == four[rank][2]


def _least_peaks(runs_of_all_ranks):
    return [min(peak for _, peak, *_ in found) for found in zip(*runs_of_all_ranks, strict=True)]
