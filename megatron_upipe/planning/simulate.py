"""A training step of the real model code on tensors without data: what is alive, what is sent, how often things run.

Megatron's GPTModel with UPipe's layers runs forward and backward as the last of ranks that do not exist (in a ring it
has the largest blocks), under torch's FakeTensorMode. Attention kernels and norms are stand-ins with the tensors of the
GPU kernels (``stand_ins.py``); parameters, gradients and optimizer states are counted by formula (``states.py``) and
left out of the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_upipe.config import RotarySettings, UPipeConfig
from megatron_upipe.context.segments import Segments
from megatron_upipe.errors import UPipeError
from megatron_upipe.kernels.protocol import Kernel
from megatron_upipe.kernels.select import KERNELS
from megatron_upipe.planning.documents import most_pairs, pairs_of_rank
from megatron_upipe.planning.ledger import RECEIVED, Ledger, Maker
from megatron_upipe.planning.scenario import Scenario
from megatron_upipe.planning.stand_ins import BalancedExperts, FusedNorm, Runs, SimulatedKernel

SIMULATED_LAYERS = 2
"""More are the same again: each adds what waits for its backward, and runs once more."""
LAYERS, VOCABULARY = "layers", "vocabulary"


@dataclass(frozen=True)
class Step:
    """What one step of the simulated layers does on a rank, in bytes.

    ``peaks``: of activations, without states, by phase (``LAYERS``, or the embedding or the loss: ``VOCABULARY``) and
    calls that made something; ``at_peaks`` what was alive then, by owner. ``host``: of the host store. ``sent`` by
    kind; ``copied`` "to host" and "to device". FLOPs of matrix products by phase, and of attention.
    """

    layers: int
    peaks: dict[Maker, int]
    at_peaks: dict[Maker, dict[str, int]]
    host: int
    sent: dict[str, int]
    copied: dict[str, int]
    collectives: dict[str, int]
    gemm_flops: dict[str, float]
    attention_forward: int
    attention_forward_flops: float
    attention_backward_flops: float
    timeline: tuple[int, ...]


def simulate_step(scenario: Scenario, layers: int) -> Step:
    """Runs ``layers`` layers with embedding and loss. Not to be called where torch.distributed is in use.

    As the last rank; with packed documents in a ring as the first, too, which gathers queries where the last gathers
    keys: the larger peaks count.
    """
    last = _simulate(scenario, layers, scenario.gpus - 1)
    if scenario.documents is None or scenario.sizes[1] == 1:
        return last
    first = _simulate(scenario, layers, 0)
    more = {maker for maker, peak in first.peaks.items() if peak > last.peaks.get(maker, 0)}
    return replace(
        last,
        peaks=last.peaks | {maker: first.peaks[maker] for maker in more},
        at_peaks=last.at_peaks | {maker: first.at_peaks[maker] for maker in more},
        sent={kind: max(last.sent.get(kind, 0), first.sent.get(kind, 0)) for kind in last.sent | first.sent},
        attention_forward_flops=max(last.attention_forward_flops, first.attention_forward_flops),
        attention_backward_flops=max(last.attention_backward_flops, first.attention_backward_flops),
        timeline=max(last.timeline, first.timeline, key=lambda line: max(line, default=0)),
    )


def _simulate(scenario: Scenario, layers: int, rank: int) -> Step:
    """``rank``: the first or the last."""
    with _fake_ranks(scenario, rank) as store, _fake_mode():
        runs = Runs()
        model = build_model(scenario, layers, SimulatedKernel(_kernel(scenario), runs))
        segments = scenario.segments
        ledger = run_step(model, scenario.local_tokens, None if scenario.documents is None else segments)
        # this is not always the rank with the most attention, which the others wait for
        ring_rank = scenario.sizes[1] - 1 if rank else 0
        busiest = most_pairs(segments) / (pairs_of_rank(segments, ring_rank) or math.inf)
        ledger.collectives.pop(RECEIVED, None)
        received = ledger.sent.pop(RECEIVED, 0)
        if received:  # links work both ways at once: the busier way counts
            ledger.sent["ring"] = max(ledger.sent["ring"], received)
        return Step(
            layers=layers,
            peaks=dict(ledger.peaks),
            at_peaks=ledger.at_peaks,
            host=store.bytes,
            sent=dict(ledger.sent),
            copied=dict(ledger.copied),
            collectives=dict(ledger.collectives),
            gemm_flops=dict(ledger.gemm_flops),
            attention_forward=runs.forward,
            attention_forward_flops=runs.forward_flops * busiest,
            attention_backward_flops=runs.backward_flops * busiest,
            timeline=tuple(ledger.timeline),
        )


def run_step(model: Any, tokens: int, segments: Segments | None = None) -> Ledger:
    """Forward and backward of one micro-batch of ``tokens`` = s local tokens, counted without ``model``'s own bytes.

    ``segments``: packed documents. Collective where the process groups are real.
    """
    ids = torch.zeros(1, tokens, dtype=torch.long)
    ledger = Ledger()

    def enter(phase: str) -> None:
        ledger.phase = phase

    decoder = model.decoder
    hooks = [
        # forward into the layers, and backward out of them; forward out, and backward in
        decoder.register_forward_pre_hook(lambda *_: enter(LAYERS)),
        decoder.final_layernorm.register_forward_pre_hook(lambda *_: enter(VOCABULARY)),
        decoder.layers[0].register_forward_pre_hook(
            lambda _, args, kwargs: _on_gradient(args, kwargs, lambda: enter(VOCABULARY)), with_kwargs=True
        ),
        decoder.final_layernorm.register_forward_pre_hook(
            lambda _, args: _on_gradient(args, {}, lambda: enter(LAYERS))
        ),
    ]
    ledger.phase = VOCABULARY
    with ledger:
        model(ids, ids, None, labels=ids, packed_seq_params=_packed(segments)).sum().backward()
    for hook in hooks:
        hook.remove()
    return ledger


def _packed(segments: Segments | None) -> Any:
    """As Megatron's data loader would hand them over; lengths in tensors could not be read here."""
    from megatron.core.packed_seq_params import PackedSeqParams

    if segments is None:
        return None
    longest = max(stop - start for start, stop in segments.documents)
    packed = PackedSeqParams(qkv_format="thd", max_seqlen_q=longest, max_seqlen_kv=longest)
    packed.upipe_segments = segments
    return packed


def _on_gradient(args: tuple, kwargs: dict, call: Callable[[], None]) -> None:
    """``call`` when the gradient of a module's first input is there; where backward runs it again, none comes."""
    hidden = args[0] if args else kwargs["hidden_states"]
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: call())


@cache
def _fake_mode() -> FakeTensorMode:
    """One for all: tensors that some code caches must not meet another."""
    return FakeTensorMode()


@contextmanager
def _fake_ranks(scenario: Scenario, rank: int) -> Iterator[Any]:
    """Megatron's groups as ``rank`` has them, the CPU stand-in, and an empty host store."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_upipe.integration import cpu
    from megatron_upipe.integration.symbols import registry
    from megatron_upipe.memory.host_store import host_store

    stand_in = not cpu.is_installed()
    if stand_in:
        cpu.install(quiet=True)
    registry.install(_OWNER, replacements())
    host_store.cache_clear()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=scenario.gpus)
    try:
        p, r = scenario.sizes
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=scenario.tensor_parallel,
            context_parallel_size=p * r,
            hierarchical_context_parallel_sizes=[p, r],
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(1)
        yield host_store(torch.device("cpu"))
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        host_store.cache_clear()
        registry.undo(_OWNER)
        if stand_in:
            cpu.uninstall()


_OWNER = "simulation"


def replacements() -> list[Any]:
    """What ``build_model`` needs in the place of Megatron's own."""
    from megatron_upipe.integration import language_models
    from megatron_upipe.integration.symbols import Replacement

    return [
        *language_models.replacements(),
        Replacement(
            "megatron.core.tensor_parallel.layers:_grad_accum_fusion_available",
            lambda original: True,
            "gradients go to main_grad, as with Apex or TransformerEngine; the linears that need those do not run",
        ),
        Replacement(
            "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork",
            lambda original: lambda self, name="": nullcontext(),
            "compares states of generators, which have no data here; nothing is drawn",
        ),
    ]


def _kernel(scenario: Scenario) -> Kernel:
    """Raises UPipeError for a name that no kernel has."""
    found = [kernel for kernel in KERNELS if kernel.name == scenario.attention_backend]
    if not found:
        known = ", ".join(kernel.name for kernel in KERNELS)
        raise UPipeError(f"--kernel {scenario.attention_backend} does not exist; choose {known}")
    return found[0]


def build_model(scenario: Scenario, layers: int, kernel: Kernel) -> Any:
    """Megatron's GPTModel with ``layers`` of UPipe's layers, fused norms and ``kernel``, ready for gradients.

    On this rank of the process groups that are set up; its tensors have what the current mode gives them. Weights are
    not initialised.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    from megatron_upipe.attention.module import UPipeSelfAttention
    from megatron_upipe.layer_specs import upipe_layer_spec

    shape, (p, r) = scenario.model, scenario.sizes
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        qk_layernorm=shape.qk_norm,
        params_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=True,
        normalization="RMSNorm",
        transformer_impl="local",
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=scenario.tensor_parallel,
        sequence_parallel=scenario.tensor_parallel > 1,
        context_parallel_size=p * r,
        hierarchical_context_parallel_sizes=[p, r],
    )
    config.upipe = UPipeConfig(
        heads_per_stage=scenario.schedule.heads_per_stage,
        rope=scenario.rotary,
        rotary=RotarySettings(base=shape.rope_base),
        keep_attention=scenario.kept(layers),
        offload=scenario.offload,
        prefetch=scenario.prefetch if scenario.offload == "host" else "auto",
        checkpoint_every=scenario.checkpoint_every,
        overlap=scenario.overlap,
        mlp_tile_tokens=scenario.mlp_tile_tokens,
        loss_tile_tokens=scenario.loss_tile_tokens,
        packed_layout=scenario.packed_layout,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=upipe_layer_spec,
        vocab_size=-(-shape.vocabulary // (128 * scenario.tensor_parallel)) * 128 * scenario.tensor_parallel,
        max_sequence_length=scenario.tokens,
        position_embedding_type="rope",
        rotary_base=int(shape.rope_base),
        share_embeddings_and_output_weights=shape.tied,
        parallel_output=True,
    )
    if shape.experts:
        for layer in model.decoder.layers:
            layer.mlp = BalancedExperts(shape.hidden, shape.ffn, shape.experts, shape.experts_per_token)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.RMSNorm):
                setattr(module, name, FusedNorm(child))
        if isinstance(module, UPipeSelfAttention):
            module.use_kernel(kernel)
    for parameter in model.parameters():
        parameter.main_grad = torch.empty(parameter.shape, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
        parameter.register_post_accumulate_grad_hook(_forget_gradient)
    return model


def _forget_gradient(parameter: torch.Tensor) -> None:
    """As Megatron's DDP does once it has it in ``main_grad``."""
    parameter.grad = None
