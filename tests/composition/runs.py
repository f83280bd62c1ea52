"""One composition through Megatron's own schedules, DDP, finalize and optimizer, and the unsharded stock run of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from types import MethodType
from typing import Any, NamedTuple

import torch
from composition.grids import Grid
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron_version import BEFORE_019

from megatron_upipe.config import UPipeConfig
from megatron_upipe.integration.language_models import with_tiled_loss_after
from megatron_upipe.integration.packed_batch import partition_indices
from megatron_upipe.layers.output import tiled_losses
from megatron_upipe.memory.host_store import host_store

VOCABULARY = 32
STEPS = 3


class Run(NamedTuple):
    """What is compared: everything by its name in the unsharded model."""

    initial: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]  # after the first finalize
    norms: list[float]
    final: dict[str, torch.Tensor]  # parameters after three optimizer steps
    losses: list[torch.Tensor]  # of every token, [b, s], of the first step's micro-batches in order


def reference(rank: int, grid: Grid, initial: dict[str, torch.Tensor] | None = None) -> Run:
    """The stock spec on one rank; world 1. ``initial`` weights are those of another run, made by itself by default."""
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(5)
    return _train(grid, _models(grid, upipe=False), distributed_optimizer=False, overlap=False, initial=initial)


def sharded_gradients(grid: Grid, initial: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's finalized gradients by the names of the unsharded model. Collective over the world."""
    _initialize(grid)
    return _train(grid, _models(grid, upipe=True), grid.distributed_optimizer, grid.overlap, initial).gradients


def compare(rank: int, grid: Grid, wanted: Run) -> dict[str, float]:
    """Largest relative errors of this rank's gradients, norms and final parameters. Collective over the world."""
    _initialize(grid)
    models = _models(grid, upipe=True)
    found = _train(grid, models, grid.distributed_optimizer, grid.overlap, wanted.initial)
    errors = {}
    if found.losses:  # only the last pipeline stage has any
        first = parallel_state.get_data_parallel_rank() * grid.micro_batches
        for index, losses in enumerate(found.losses):
            which = 0, parallel_state.get_data_parallel_rank(), index
            part = _on_this_rank({"losses": wanted.losses[first + index]}, grid, which)["losses"]
            errors[f"losses {index}"] = ((losses - part).abs().max() / part.abs().max()).item()
    for kind, mine, whole in (("gradient", found.gradients, wanted.gradients), ("final", found.final, wanted.final)):
        for name, value in mine.items():
            if name not in whole:
                raise AssertionError(f"{kind} of {name} is unexpected")
            part = shard(name, whole[name], grid)
            scale = whole[name].abs().max().clamp_min(1e-15 if grid.precision == "fp64" else 1e-6)
            errors[f"{kind} {name}"] = ((value - part).abs().max() / scale).item()
    for step, (norm, want) in enumerate(zip(found.norms, wanted.norms, strict=True)):
        errors[f"norm {step}"] = abs(norm - want) / want
    return errors


def _initialize(grid: Grid) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        virtual_pipeline_model_parallel_size=2 if grid.virtual else None,
        context_parallel_size=grid.p * grid.r,
        hierarchical_context_parallel_sizes=[grid.p, grid.r],
        create_gloo_process_groups=False,  # second copies of the groups, for checkpoints; they cost seconds
    )
    model_parallel_cuda_manual_seed(5)


def _config(grid: Grid, upipe: bool) -> TransformerConfig:
    parallel: dict[str, Any] = {}
    if upipe:
        parallel = dict(
            tensor_model_parallel_size=grid.tp,
            pipeline_model_parallel_size=grid.pp,
            virtual_pipeline_model_parallel_size=2 if grid.virtual else None,
            context_parallel_size=grid.p * grid.r,
            hierarchical_context_parallel_sizes=[grid.p, grid.r],
            sequence_parallel=grid.sequence_parallel,
            deallocate_pipeline_outputs=True,  # as pretrain() has it
        )
        if grid.virtual:  # Megatron asks for it on two stages: with batched exchange, messages of one pair mix
            parallel |= dict(overlap_p2p_comm=True, batch_p2p_comm=False)
    config = TransformerConfig(
        num_layers=grid.layers,
        hidden_size=grid.hidden,
        ffn_hidden_size=40,
        num_attention_heads=grid.heads,
        num_query_groups=grid.kv_heads,
        kv_channels=grid.head_dim,
        params_dtype=_dtype(grid),
        pipeline_dtype=_dtype(grid),
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        add_bias_linear=grid.bias,
        add_qkv_bias=grid.qkv_bias,
        qk_layernorm=grid.qk_layernorm,
        attention_output_gate=grid.gate,
        rotary_interleaved=grid.interleaved,
        normalization="LayerNorm" if grid.layer_norm else "RMSNorm",
        gated_linear_unit=grid.activation == "swiglu",
        activation_func=_ACTIVATIONS[grid.activation],
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        transformer_impl="local",
        calculate_per_token_loss=True,
        window_size=None if grid.window is None else (grid.window, 0),
        softmax_type=grid.sinks,
        **(_EXPERTS | dict(num_moe_experts=grid.experts, moe_router_dtype=grid.precision) if grid.experts else {}),
        **parallel,
    )
    config.bf16 = grid.precision == "bf16"
    config.upipe = UPipeConfig(
        heads_per_stage=grid.heads_per_stage,
        keep_attention=grid.keep_attention,
        offload=grid.offload,
        prefetch=grid.prefetch,
        checkpoint_every=grid.checkpoint_every,
        mlp_tile_tokens=grid.mlp_tile_tokens,
        loss_tile_tokens=grid.loss_tile_tokens,
        packed_layout=grid.documents or "document",
    )
    return config


def _models(grid: Grid, upipe: bool, stock_spec: bool | None = None) -> list[torch.nn.Module]:
    """This rank's model chunks, not yet wrapped; ``upipe`` False is the unsharded stock run."""
    config = _config(grid, upipe)
    stock = stock_spec if stock_spec is not None else not upipe
    torch.manual_seed(grid.seed)
    chunks = 2 if upipe and grid.virtual else 1
    models = []
    for chunk in range(chunks):
        stage = dict(ignore_virtual=False, vp_stage=chunk) if chunks > 1 else dict(ignore_virtual=True)
        vp_stage = chunk if chunks > 1 else None
        kind, layers = _hybrid(grid, stock) if grid.hybrid else _gpt(config, stock, vp_stage)
        model = kind(
            config=config,
            **layers,
            vocab_size=VOCABULARY,
            max_sequence_length=grid.length,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=grid.tied,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        ).to(_dtype(grid))
        if grid.hybrid and not stock:
            model.forward = MethodType(with_tiled_loss_after(HybridModel.forward), model)  # as the launcher does
        elif grid.hybrid and grid.precision == "fp64":
            model.compute_language_model_loss = _precise_loss
        models.append(model)
    return models


def _gpt(config: TransformerConfig, stock: bool, vp_stage: int | None) -> tuple[type, dict]:
    from megatron_upipe.layer_specs import upipe_layer_spec

    if not stock:
        spec = upipe_layer_spec
    elif config.num_moe_experts:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
        )
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    return GPTModel, {"transformer_layer_spec": spec}


def _hybrid(grid: Grid, stock: bool) -> tuple[type, dict]:
    from megatron_upipe.layer_specs import upipe_hybrid_stack_spec
    from megatron_upipe.layers.local_hybrid import local_hybrid_submodules

    norm = "LayerNorm" if grid.layer_norm else "RMSNorm"
    local = ModuleSpec(module=HybridStack, submodules=local_hybrid_submodules(norm, grid.qk_layernorm))
    spec = local if stock else upipe_hybrid_stack_spec
    pattern = grid.hybrid.replace("|", "") if torch.distributed.get_world_size() == 1 else grid.hybrid
    return HybridModel, {"hybrid_stack_spec": spec, "hybrid_layer_pattern": pattern}


def _train(grid: Grid, models: list, distributed_optimizer: bool, overlap: bool, initial: dict | None) -> Run:
    """Three steps through Megatron's schedule, finalize and optimizer."""
    config = models[0].config
    names = [_global_names(model, grid) for model in models]
    for model, chunk_names in zip(models, names, strict=True):
        _prepare(model, chunk_names, grid, initial)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=grid.precision != "fp64",
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and distributed_optimizer,
        use_distributed_optimizer=distributed_optimizer,
        bucket_size=600 if overlap else None,
    )
    start = {n: p.detach().clone() for c in names for p, n in c.items()}
    wrapped = [DistributedDataParallel(config, ddp, model) for model in models]
    config.finalize_model_grads_func = finalize_model_grads
    if overlap:
        config.no_sync_func = [w.no_sync for w in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
        if ddp.overlap_param_gather and len(wrapped) > 1:
            config.param_sync_func = [w.start_param_sync for w in wrapped]
    optimizer = (
        None
        if grid.precision != "fp32"
        else get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                adam_eps=1e-3,  # steps follow the gradient's size, not the sign of its rounding
                weight_decay=0.01,
                clip_grad=0.5,
                params_dtype=torch.float32,
                use_distributed_optimizer=distributed_optimizer,
                overlap_param_gather=ddp.overlap_param_gather,
            ),
            wrapped,
            use_gloo_process_groups=False,
        )
    )
    gradients: dict[str, torch.Tensor | None] = {}
    norms, all_losses = [], []
    alone = torch.distributed.get_world_size() == 1  # the stock run
    for step in range(1 if optimizer is None else STEPS):
        for w in wrapped:
            w.zero_grad_buffer()
        if optimizer is not None:
            optimizer.zero_grad()
        iterators = [_batches(grid, step) for _ in wrapped]
        get_forward_backward_func()(
            forward_step_func=partial(_forward_step, grid, alone, all_losses if step == 0 else []),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=wrapped if len(wrapped) > 1 else wrapped[0],
            num_microbatches=grid.micro_batches * (grid.dp if alone else 1),
            seq_length=grid.length,
            micro_batch_size=grid.micro_batch,
            forward_only=False,
        )
        if step == 0:
            gradients = _gradients(wrapped, names, distributed_optimizer)
        if optimizer is not None:
            _, norm, _ = optimizer.step()
            norms.append(float(norm))
    if ddp.overlap_param_gather:
        for w in wrapped:
            w.start_param_sync(force_sync=True)
    final = {n: p.detach().clone() for c in names for p, n in c.items()}
    in_use = host_store(torch.device("cpu")).in_use
    assert in_use == 0, f"{in_use} slots of the host store are in use after the last step"
    return Run(start, {k: v for k, v in gradients.items() if v is not None}, norms, final, all_losses)


# Megatron's linear with a frozen weight gives its bias no gradient, so both are frozen.
_FROZEN = ("decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.0.self_attention.linear_qkv.bias")


def _prepare(model: torch.nn.Module, names: dict, grid: Grid, initial: dict | None) -> None:
    """Weights of the unsharded run, or for that run itself norms and biases that are not ones and zeros."""
    with torch.no_grad():
        for parameter, name in names.items():
            if initial is not None:
                parameter.copy_(shard(name, initial[name], grid))
            elif "norm" in name or name.endswith(("bias", "softmax_offset")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            if grid.frozen and name in _FROZEN:
                parameter.requires_grad_(False)
    model.config.gradient_accumulation_fusion = grid.fuse  # Megatron's own linears have read it, and need Apex for it
    for module in model.modules():
        if hasattr(module, "plan"):
            object.__setattr__(module.plan, "fuse_weight_gradients", grid.fuse)


def _gradients(wrapped: list, names: list[dict], distributed_optimizer: bool) -> dict[str, torch.Tensor | None]:
    """Finalized gradients; None for frozen parameters."""
    if distributed_optimizer:
        _gather_shards(wrapped)
    return {
        name: parameter.main_grad.detach().clone() if parameter.requires_grad else None
        for chunk in names
        for parameter, name in chunk.items()
    }


def _gather_shards(wrapped: list) -> None:
    """Under the distributed optimizer a rank holds the sum in its part of each bucket; puts the parts together."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for bucket in (b for w in wrapped for buffer in w.buffers for b in buffer.buckets):
        part = bucket.grad_data.numel() // group.size()
        mine = slice(group.rank() * part, (group.rank() + 1) * part)
        whole = torch.zeros_like(bucket.grad_data)
        whole[mine] = bucket.grad_data[mine]
        torch.distributed.all_reduce(whole, group=group)
        bucket.grad_data.copy_(whole)


def _batches(grid: Grid, step: int):
    """This data-parallel rank's micro-batches; the unsharded run gets those of all ranks."""
    alone = torch.distributed.get_world_size() == 1
    ranks = range(grid.dp) if alone else [parallel_state.get_data_parallel_rank()]
    for dp_rank in ranks:
        for index in range(grid.micro_batches):
            generator = torch.Generator().manual_seed(1000 * grid.seed + 100 * step + 10 * dp_rank + index)
            shape = (grid.micro_batch, grid.length)
            tokens = torch.randint(VOCABULARY, (shape[0], shape[1] + 1), generator=generator)
            keep = 0.1 if index == 0 else 0.8  # uneven between micro-batches and between shards
            mask = (torch.rand(shape, generator=generator) < keep).float()
            mask[:, 0] = 1.0
            batch = {
                "tokens": tokens[:, :-1].contiguous(),
                "labels": tokens[:, 1:].contiguous(),
                "loss_mask": mask,
                "attention_mask": None,
                "position_ids": torch.arange(grid.length).expand(shape).contiguous(),
            }
            which = step, dp_rank, index
            yield _on_this_rank(batch, grid, which) | {"packed_seq_params": _packed(grid.lengths(*which))}


def _on_this_rank(batch: dict, grid: Grid, which: tuple[int, int, int]) -> dict:
    """This context-parallel rank's tokens of [b, s, ...] tensors."""
    group, lengths = parallel_state.get_context_parallel_group(), grid.lengths(*which)
    if grid.documents != "document" or group.size() == 1:
        return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    cumulative = torch.tensor([0, *accumulate(lengths)])
    indices = partition_indices(cumulative, grid.length, group.size(), group.rank(), torch.device("cpu"))
    return {key: None if tensor is None else tensor.index_select(1, indices) for key, tensor in batch.items()}


def _packed(lengths: list[int] | None) -> PackedSeqParams | None:
    if lengths is None:
        return None
    cumulative = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    sizes = dict(max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cumulative, cu_seqlens_kv=cumulative, **sizes)


def _forward_step(
    grid: Grid, stock: bool, all_losses: list, data_iterator: Any, model: torch.nn.Module
) -> tuple[torch.Tensor, Callable]:
    batch = next(data_iterator)
    processor = None if stock or not grid.loss_tile_tokens else tiled_losses
    if stock and grid.precision == "fp64":
        processor = _precise_losses
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        packed_seq_params=batch["packed_seq_params"],
        **({} if grid.hybrid else {"output_processor": processor}),
    )

    def loss(losses: torch.Tensor) -> tuple:
        all_losses.append(losses.detach().clone())
        mask = batch["loss_mask"].reshape(-1)
        return (losses.reshape(-1) * mask).sum(), mask.sum().to(torch.int), {}

    return output, loss


def _precise_losses(hidden_states: Any, output_layer: Any, output_weight: Any, labels: Any, **others: Any) -> Any:
    """Megatron's own cross entropy is in fp32 whatever the model is in."""
    logits, _ = output_layer(hidden_states, weight=output_weight)
    return _precise_loss(labels, logits)


def _precise_loss(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")


def _dtype(grid: Grid) -> torch.dtype:
    return {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[grid.precision]


_EXPERTS = dict(
    moe_layer_freq=2,
    moe_router_topk=2,
    moe_ffn_hidden_size=20,
    moe_token_dispatcher_type="allgather",
    moe_aux_loss_coeff=0.0 if BEFORE_019 else 0.01,  # 0.18 takes part of it in fp32
)
_ACTIVATIONS = {
    "swiglu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "squared relu": squared_relu,
}


def _global_names(model: torch.nn.Module, grid: Grid) -> dict[torch.nn.Parameter, str]:
    """parameter -> its name in the unsharded model."""
    found = {}
    for name, parameter in model.named_parameters():
        words = name.split(".")
        if words[:2] == ["decoder", "layers"]:
            layer = model.decoder.layers[int(words[2])]
            words[2] = str(layer.layer_number - 1)
        found[parameter] = ".".join(words)
        if grid.tied and name == "output_layer.weight":
            found[parameter] = "embedding.word_embeddings.weight"
    return found


_SPLIT = {
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "linear_qkv.weight": 0,
    "linear_qkv.bias": 0,
    "linear_proj.weight": 1,
    "linear_fc1.weight": 0,
    "linear_fc1.bias": 0,
    "linear_fc2.weight": 1,
    "softmax_offset": 0,
}


def shard(name: str, whole: torch.Tensor, grid: Grid) -> torch.Tensor:
    """This tensor-parallel rank's part."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    tp = parallel_state.get_tensor_model_parallel_world_size()
    if "linear_fc1." in name and grid.activation == "swiglu":  # gate and up halves are split each
        return torch.cat([half.chunk(tp)[rank] for half in whole.chunk(2)])
    for ending, dim in _SPLIT.items():
        if name.endswith(ending):
            return whole.chunk(tp, dim)[rank]
    return whole
