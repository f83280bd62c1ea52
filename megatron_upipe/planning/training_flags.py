"""A scenario as flags of ``python -m megatron_upipe.run``, to paste. Free of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_upipe.planning.scenario import Scenario

_SHARDING = {
    "ddp": "",
    "distributed-optimizer": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "megatron-fsdp": "--use-distributed-optimizer --use-megatron-fsdp --data-parallel-sharding-strategy "
    "optim_grads_params --megatron-fsdp-main-grads-dtype fp32 --ckpt-format fsdp_dtensor "
    "--suggested-communication-unit-size 1 --overlap-grad-reduce --overlap-param-gather",
}


def training_flags(scenario: Scenario) -> list[str]:
    """Parallelism, precision, sharding and UPipe's policy; model, data and schedule are the user's."""
    s, (p, r) = scenario, scenario.sizes
    flags = ["--spec", "megatron_upipe.layer_specs", "upipe_layer_spec", "--bf16", "--micro-batch-size", "1"]
    flags += ["--seq-length", str(s.tokens), "--max-position-embeddings", str(s.tokens)]
    if s.documents is not None:
        flags.append("--sft" if s.packed_layout == "document" else "--dataloader-inter-document-masking")
    if s.tensor_parallel > 1:
        flags += ["--tensor-model-parallel-size", str(s.tensor_parallel), "--sequence-parallel"]
    if s.pipeline_parallel > 1:
        flags += ["--pipeline-model-parallel-size", str(s.pipeline_parallel)]
    flags += ["--context-parallel-size", str(p * r), "--hierarchical-context-parallel-sizes", str(p), str(r)]
    flags += ["--upipe-heads-per-stage", str(s.schedule.heads_per_stage)]
    flags += ["--upipe-attention-backend", s.attention_backend]
    flags += ["--upipe-keep-attention", "all" if s.keep_attention is None else str(s.keep_attention)]
    flags += ["--upipe-overlap", s.overlap, "--upipe-offload", s.offload]
    if s.offload == "host":
        flags += ["--upipe-prefetch", s.prefetch]
    if s.checkpoint_every > 1:
        flags += ["--upipe-checkpoint-every", str(s.checkpoint_every)]
    flags += ["--upipe-mlp-tile-tokens", str(s.mlp_tile_tokens), "--upipe-loss-tile-tokens", str(s.loss_tile_tokens)]
    flags += _SHARDING[s.sharding].split()
    if s.optimizer_on_host:
        flags += ["--optimizer-cpu-offload", "--optimizer-offload-fraction", "1.0", "--use-precision-aware-optimizer"]
    return flags


def simulate_flags(scenario: Scenario, model: str) -> list[str]:
    """Of ``megatron-upipe simulate``, for the same scenario."""
    s, (p, r) = scenario, scenario.sizes
    flags = ["--model", model, "--gpus", str(s.gpus), "--gpus-per-node", str(s.gpus_per_node), "--tp"]
    flags += [str(s.tensor_parallel), "--ulysses", str(p), "--ring", str(r), "--tokens", str(s.tokens)]
    flags += ["--heads-per-stage", str(s.schedule.heads_per_stage)]
    flags += ["--keep-attention", "all" if s.keep_attention is None else str(s.keep_attention)]
    flags += ["--overlap", s.overlap, "--offload", s.offload]
    flags += ["--prefetch", s.prefetch, "--checkpoint-every", str(s.checkpoint_every)]
    flags += ["--mlp-tile-tokens", str(s.mlp_tile_tokens), "--loss-tile-tokens", str(s.loss_tile_tokens)]
    flags += ["--kernel", s.attention_backend, "--sharding", s.sharding]
    if s.documents is not None:
        flags += ["--documents", *map(str, s.documents), "--packed-layout", s.packed_layout]
    return [*flags, "--optimizer", "host" if s.optimizer_on_host else "gpu"]
