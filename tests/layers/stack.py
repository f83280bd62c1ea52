"""Layers on 2 ranks that the tests of this folder run."""

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module

from megatron_upipe.context.layout import SequenceLayout
from megatron_upipe.integration.selftest.layers import SWIGLU
from megatron_upipe.integration.selftest.parity import Case, _randomise, initialize, local, make_config, rotary_table
from megatron_upipe.layer_specs import upipe_layer_spec

LAYERS = 4
HOST = dict(offload="host")


def build(case=None, **upipe):
    """``LAYERS`` layers on 2 ranks, x, RoPE table."""
    if not parallel_state.model_parallel_is_initialized():
        initialize(2, 1)
    case = case or Case(config=SWIGLU, upipe={"mlp_tile_tokens": 5, **upipe})
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = make_config(case, 2, 1, num_layers=LAYERS)
    torch.manual_seed(4)
    layers = [
        build_module(upipe_layer_spec, config=config, layer_number=i + 1, pg_collection=groups).double()
        for i in range(LAYERS)
    ]
    for layer in layers:
        _randomise(layer)
    length = 4 * case.chunk
    x = torch.randn(length // 2, case.micro_batch, case.hidden, dtype=torch.float64)
    table = local(rotary_table(case, length), SequenceLayout(2, 1), parallel_state.get_context_parallel_rank())
    return layers, x, table


def run(layers, x, table, packed=None):
    for layer in layers:
        x, _ = layer(x, None, rotary_pos_emb=table, packed_seq_params=packed)
    return x
