"""Measured peaks of live bytes of a UPipe layer by phase, Llama3-8B's proportions scaled down; CPU and gloo.

    torchrun --nproc-per-node 4 benchmarks/layer_peak.py

Two layers run forward and backward; the phases are those of the first one. Counts tensors (see
``megatron_upipe.planning.live_bytes``) on rank 0, in units of u1, one [s, b, H*d] tensor; weights, their gradients and
buffers of the host store are left out.
"""

import argparse
import json
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module
from prompt_exchange import prompt_exchanges

from megatron_upipe.integration import cpu
from megatron_upipe.integration.selftest.layers import SWIGLU
from megatron_upipe.integration.selftest.parity import Case, initialize, make_config
from megatron_upipe.layer_specs import upipe_layer_spec
from megatron_upipe.layers import function
from megatron_upipe.planning.live_bytes import LiveBytes

PHASES = ("attention forward", "MLP forward", "MLP backward", "attention backward")
POLICIES = {
    "keep, on the device": dict(),
    "keep, on the host": dict(offload="host"),
    "input, on the device": dict(keep_attention=0),
    "input, on the host": dict(keep_attention=0, offload="host"),
}
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN = 32, 8, 8, 256, 896  # Llama3-8B's over 16


class Phases:
    """Peak of ``live`` while each half of the layer function runs, for the layer that runs ``first`` and last."""

    def __init__(self, live: LiveBytes) -> None:
        self.live, self.peaks = live, dict.fromkeys(PHASES, 0)

    def of(self, phase: str, layer: int, call: Callable) -> Callable:
        """``call`` with its peak noted when it runs for the ``layer``-th time."""
        calls = []

        def measured(*args, **kwargs):
            calls.append(1)
            self.live.peak = self.live.now
            result = call(*args, **kwargs)
            if len(calls) == layer:
                self.peaks[phase] = self.live.peak
            return result

        return measured


def layer_peaks(
    policy: dict, tokens: int, tile_tokens: int, ranks: int, heads: int = HEADS, dtype: torch.dtype = torch.float32
) -> dict[str, float]:
    """Peak of each phase in u1, with U = P = ``ranks``; the model is as wide as its ``heads``. Collective."""
    hidden = heads * HEAD_DIM
    initialize(ranks, 1)
    case = Case(
        heads,
        KV_HEADS,
        ranks,
        micro_batch=1,
        head_dim=HEAD_DIM,
        hidden=hidden,
        config=SWIGLU,
        upipe=dict(mlp_tile_tokens=tile_tokens, **policy),
    )
    config = make_config(case, ranks, 1, num_layers=2, ffn_hidden_size=FFN * heads // HEADS, params_dtype=dtype)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layers = [build_module(upipe_layer_spec, config=config, layer_number=i + 1, pg_collection=groups) for i in range(2)]
    for layer in layers:
        layer.requires_grad_(False)
    start = torch.randn(tokens, 1, hidden, dtype=dtype, requires_grad=True)
    _step(layers, start)  # makes the buffers of the host store
    with prompt_exchanges(), LiveBytes() as live:
        phases = Phases(live)
        replaced = _replace(phases)
        _step(layers, start)
    for owner, name, original in replaced:
        setattr(owner, name, original)
    return {phase: peak / start.nbytes for phase, peak in phases.peaks.items()}


def _step(layers: list[torch.nn.Module], start: torch.Tensor) -> None:
    start.grad = None
    x = start * 1
    for layer in layers:
        x, _ = layer(x, None)
    x.mul_(1.0)  # a gradient of its own, as a norm behind the layer leaves it
    x = x.sum()  # lets go of the output
    x.backward()


def _replace(phases: Phases) -> list[tuple]:
    """Puts measuring functions into the layer function; backward comes to the first layer last."""
    places = (
        (function, "attention_forward", "attention forward", 1),
        (function.LayerCall, "finish", "MLP forward", 1),
        (function, "attention_backward", "attention backward", 2),
        (function.LayerCall, "second_half_gradient", "MLP backward", 2),
    )
    replaced = []
    for owner, name, phase, layer in places:
        original = getattr(owner, name)
        setattr(owner, name, phases.of(phase, layer, original))
        replaced.append((owner, name, original))
    return replaced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="of a rank")
    parser.add_argument("--tile-tokens", type=int, default=16, help="--upipe-mlp-tile-tokens")
    parser.add_argument("--heads", type=int, default=HEADS, help="query heads of size 8, which set the hidden size")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    cpu.install()
    dist.init_process_group("gloo")
    found = {}
    for name, policy in POLICIES.items():
        found[name] = layer_peaks(
            policy, args.tokens, args.tile_tokens, dist.get_world_size(), args.heads, getattr(torch, args.dtype)
        )
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        if args.json:
            print(json.dumps(found))
        else:
            print("policy".ljust(24) + "".join(phase.rjust(20) for phase in PHASES))
            for name, peaks in found.items():
                print(name.ljust(24) + "".join(f"{peaks[phase]:17.2f} u1" for phase in PHASES))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
