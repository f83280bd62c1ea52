"""Stock and UPipe layers side by side: two of them, with everything on that waits, tiles and makes again.

The first layer's attention is computed again, the second's is kept; inputs of every second layer wait in host memory
and are fetched ahead; tiles do not divide the tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module

from megatron_upipe.context.layout import SequenceLayout
from megatron_upipe.integration.selftest.parity import (
    Case,
    _randomise,
    device,
    finalized,
    inputs,
    local,
    make_config,
    relative_error,
    tp_shard,
)

LAYERS = 2
POLICY = dict(offload="host", prefetch="on", checkpoint_every=2, keep_attention=1, mlp_tile_tokens=14)
SWIGLU = dict(gated_linear_unit=True, activation_func=F.silu, bias_activation_fusion=False)


def compare_layers(
    case: Case, p: int, r: int, groups: ProcessGroupCollection, tp: int = 1, sp: bool = False
) -> dict[str, float]:
    """Relative errors of output, dx and every weight gradient, summed as Megatron's finalize does, in fp64. Collective.

    ``groups`` are those of a reference that every rank computes alone.
    """
    from megatron_upipe.layer_specs import upipe_layer_spec

    case = replace(case, config={**SWIGLU, **case.config}, upipe={**POLICY, **case.upipe})
    layout, rank = SequenceLayout(p, r), parallel_state.get_context_parallel_rank()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    config = make_config(case, 1, 1, num_layers=LAYERS)
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    torch.manual_seed(7)
    stock = [build_module(spec, config=config, layer_number=i + 1, pg_collection=groups) for i in range(LAYERS)]
    config = make_config(case, p, r, num_layers=LAYERS, tensor_model_parallel_size=tp, sequence_parallel=sp)
    here = ProcessGroupCollection.use_mpu_process_groups()
    ours = [
        build_module(upipe_layer_spec, config=config, layer_number=i + 1, pg_collection=here) for i in range(LAYERS)
    ]
    for theirs, mine in zip(stock, ours, strict=True):
        theirs.double().to(device())
        mine.double().to(device())
        _randomise(theirs)
        with torch.no_grad():
            for name, parameter in mine.named_parameters():
                parameter.copy_(tp_shard(name, theirs.get_parameter(name), tp))
    x, dy, table = inputs(case, layout, torch.float64)

    def shard(tensor: torch.Tensor) -> torch.Tensor:
        part = local(tensor, layout, rank)
        return (part.chunk(tp)[tp_rank] if sp else part).contiguous()

    whole, part = x.clone().requires_grad_(), shard(x).requires_grad_()
    wanted, found = whole, part
    for theirs, mine in zip(stock, ours, strict=True):
        wanted, _ = theirs(wanted, None, rotary_pos_emb=table)
        found, _ = mine(found, None, rotary_pos_emb=local(table, layout, rank))
    wanted.backward(dy)
    found.backward(shard(dy))
    errors = {
        "output": relative_error(found.detach(), shard(wanted.detach())),
        "dx": relative_error(part.grad, shard(whole.grad)),
    }
    for index, (theirs, mine) in enumerate(zip(stock, ours, strict=True)):
        for name, parameter in mine.named_parameters():
            gradient = finalized(name, parameter.grad, tp_sum=_is_share(name, sp))
            reference = tp_shard(name, theirs.get_parameter(name).grad, tp)
            errors[f"{index}.{name}"] = relative_error(gradient, reference)
    return errors


def _is_share(name: str, sp: bool) -> bool:
    """Whether a tensor-parallel rank has a share of a whole parameter's gradient, that of its heads or its tokens."""
    return "q_layernorm" in name or "k_layernorm" in name or (sp and "layernorm" in name)
