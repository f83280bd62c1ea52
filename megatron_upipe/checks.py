"""What UPipe supports of Megatron's settings, and which sizes fit together.

Pure functions of attributes, so that they serve Megatron's arguments (before anything is built) and its
TransformerConfig (for training loops that have no such arguments) alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_upipe.attention.schedule import HeadSchedule, fitting_ulysses_sizes, head_schedule
from megatron_upipe.config import UPipeConfig
from megatron_upipe.context.groups import check_sizes
from megatron_upipe.context.layout import SequenceLayout
from megatron_upipe.errors import UPipeError
from megatron_upipe.precision.recipes import Fp8Recipe, check_alignment, fp8_recipe

# Tokens of a block in cuDNN's FP8 attention; numbers of a token in TransformerEngine's MXFP8 tensors
FP8_ATTENTION_TOKENS = FP8_ATTENTION_WIDTH = 128
# Parts of a layer of which UPipe keeps nothing for backward.
RECOMPUTED = ("core_attn", "mlp", "layernorm", "moe")


@dataclass(frozen=True)
class _Refusal:
    """One attribute that must not hold certain values under UPipe with P*R > 1."""

    attribute: str
    refused: Callable[[Any], Any]
    flag: str
    instead: str | Callable[[Any], str]


# Attributes that exist under the same name in Megatron's arguments and in its TransformerConfig.
_MODEL = (
    _Refusal("attention_dropout", bool, "--attention-dropout", "set it to 0"),
    _Refusal("hidden_dropout", bool, "--hidden-dropout", "set it to 0"),
    _Refusal("fp32_residual_connection", bool, "--fp32-residual-connection", "leave it out"),
    _Refusal("multi_latent_attention", bool, "--multi-latent-attention", "leave it out"),
    _Refusal("mtp_num_layers", bool, "--mtp-num-layers", "leave it out"),
    _Refusal(
        "window_size",
        lambda v: len(v) != 2 or v[1] != 0 or v[0] < -1,
        "--window-size",
        lambda v: f"windows are causal, (tokens to the left, 0): the nearest is ({max(v[0], -1)}, 0)",
    ),
    _Refusal("hybrid_context_parallel", bool, "--hybrid-context-parallel", "leave it out"),
    _Refusal("dynamic_context_parallel", bool, "--dynamic-context-parallel", "leave it out"),
    _Refusal("experimental_attention_variant", bool, "--experimental-attention-variant", "leave it out"),
    _Refusal("qk_clip", bool, "--qk-clip", "leave it out"),
    _Refusal("log_max_attention_logit", bool, "--log-max-attention-logit", "leave it out"),
    _Refusal("cp_comm_type", lambda v: v not in ("p2p", ["p2p"]), "--cp-comm-type", "leave it out, UPipe has its own"),
    _Refusal("mrope_section", bool, "--mrope-section", "leave it out"),
    _Refusal("cuda_graph_impl", lambda v: v != "none", "--cuda-graph-impl", "leave it out"),
    _Refusal("delay_wgrad_compute", bool, "--delay-wgrad-compute", "leave it out"),
    _Refusal("overlap_moe_expert_parallel_comm", bool, "--overlap-moe-expert-parallel-comm", "leave it out"),
    _Refusal("fp4", bool, "--fp4-format", "use --fp8-format"),
    _Refusal("fp8_param", bool, "--fp8-param-gather", "leave it out; UPipe quantises bf16 parameters"),
    _Refusal("fp8_output_proj", bool, "--fp8-output-proj", "leave it out"),
    _Refusal("fp8_dot_product_attention", bool, "fp8_dot_product_attention", "use --upipe-fp8-attention"),
    _Refusal("fp8_multi_head_attention", bool, "fp8_multi_head_attention", "use --upipe-fp8-attention"),
    _Refusal("cpu_offloading", bool, "--cpu-offloading-num-layers", "use --upipe-offload host"),
    _Refusal(
        "fine_grained_activation_offloading",
        bool,
        "--fine-grained-activation-offloading",
        "use --upipe-offload host",
    ),
    _Refusal("mlp_chunks_for_training", lambda v: v > 1, "--mlp-chunks-for-training", "use --upipe-mlp-tile-tokens"),
    _Refusal("moe_input_jitter_eps", bool, "--moe-input-jitter-eps", "leave it out"),
    _Refusal("moe_router_force_load_balancing", bool, "--moe-router-force-load-balancing", "leave it out"),
    _Refusal("fused_residual_rmsnorm", bool, "--fused-residual-rmsnorm", "leave it out"),
    _Refusal(
        "recompute_granularity",
        lambda v: v == "full",
        "--recompute-granularity",
        "UPipe recomputes by itself; use --upipe-keep-attention 0 to keep layer inputs only",
    ),
)

_PACKED_INSTEAD = "leave it out; --dataloader-inter-document-masking or --sft tells documents apart, without a mask"

# Attributes of Megatron's arguments only.
_TRAINING = (
    _Refusal(
        "position_embedding_type",
        lambda v: v not in ("rope", "yarn", "none"),
        "--position-embedding-type",
        "use rope, yarn or none",
    ),
    _Refusal("reset_attention_mask", bool, "--reset-attention-mask", _PACKED_INSTEAD),
    _Refusal("reset_position_ids", bool, "--reset-position-ids", _PACKED_INSTEAD),
    _Refusal(
        "megatron_fsdp_enable_fine_grained_param_gather",
        bool,
        "--megatron-fsdp-enable-fine-grained-param-gather",
        "leave it out",
    ),
    _Refusal("fp8_param_gather", bool, "--fp8-param-gather", "leave it out; UPipe quantises bf16 parameters"),
    _Refusal("use_torch_fsdp2", bool, "--use-torch-fsdp2", "use --use-megatron-fsdp or --use-distributed-optimizer"),
)

REFUSALS = _MODEL + _TRAINING


def check_model(config: Any, training: bool = False) -> None:
    """Raises UPipeError for unsupported settings of ``config``: a TransformerConfig, or arguments with ``training``.

    To be called only when P*R > 1: with one context-parallel rank the stock attention runs.
    """
    for rule in REFUSALS if training else _MODEL:
        value = getattr(config, rule.attribute, None)
        if value is not None and rule.refused(value):
            shown = rule.flag if value is True else f"{rule.flag} {_shown(value)}"
            instead = rule.instead if isinstance(rule.instead, str) else rule.instead(value)
            raise UPipeError(f"{shown} is not supported by UPipe with context parallelism; {instead}")
    shards = getattr(config, "tensor_parallel_num_weight_shards", None)
    tp = getattr(config, "tensor_model_parallel_size", 1)
    if shards is not None and shards > tp:  # since megatron-core 0.19
        raise UPipeError(
            f"--tensor-parallel-num-weight-shards {shards} is not supported by UPipe, which reads whole weights; the "
            f"nearest is {tp}, or use --use-megatron-fsdp"
        )
    if getattr(config, "recompute_granularity", None) == "selective":
        modules = getattr(config, "recompute_modules", None) or ["core_attn"]  # Megatron's default
        useless = [module for module in modules if module in RECOMPUTED]
        if useless:
            raise UPipeError(
                f"--recompute-modules {' '.join(useless)} (core_attn is the default) does nothing under UPipe, which "
                "recomputes by itself; leave --recompute-granularity out, or see --upipe-keep-attention"
            )
    check_fp8(config)


def check_fp8(config: Any) -> None:
    """Raises UPipeError unless FP8 can be had for the model of ``config``, as in ``check_model``."""
    recipe = fp8_recipe(config)
    if recipe is None:
        return
    if getattr(config, "fp8_wgrad", True) is False:
        raise UPipeError("--no-fp8-wgrad is for --fp8-recipe delayed, which UPipe does not support; leave it out")
    experts = getattr(config, "num_moe_experts", None) or getattr(config, "num_experts", None)
    if experts and config.transformer_impl != "transformer_engine":
        raise UPipeError(
            f"--fp8-format with {experts} experts needs --transformer-impl transformer_engine, whose linears they are"
        )


def check_fp8_sizes(recipe: Fp8Recipe, schedule: HeadSchedule, *, hidden: int, ffn: int | None, head_dim: int) -> None:
    """Raises UPipeError unless all products have sizes that the recipe takes. ``ffn`` of a rank, None for experts."""
    kv_heads = schedule.kv_per_rank * schedule.ulysses_size // schedule.copies
    sizes = {
        "--hidden-size": hidden,
        f"a stage's queries (--upipe-heads-per-stage {schedule.heads_per_stage} x --kv-channels {head_dim})": (
            schedule.heads_per_stage * head_dim
        ),
        f"a stage's keys and values (2 x {kv_heads} x --kv-channels {head_dim})": 2 * kv_heads * head_dim,
        "the query heads of a tensor-parallel rank": schedule.query_heads * head_dim,
    }
    if ffn is not None:
        sizes["--ffn-hidden-size / --tensor-model-parallel-size"] = ffn
    check_alignment(recipe, sizes)


def check_hybrid_policy(upipe: UPipeConfig, pipeline_stages: int) -> None:
    """Raises UPipeError for settings that need all layers to be UPipe's."""
    if upipe.checkpoint_every > 1:
        raise UPipeError(
            f"--upipe-checkpoint-every {upipe.checkpoint_every} runs UPipe layers again one after the other, and a "
            "hybrid model has others between them; use 1"
        )
    if upipe.keep_attention is not None and pipeline_stages > 1:
        raise UPipeError(
            f"--upipe-keep-attention {upipe.keep_attention} cannot be spread over the pipeline stages of a hybrid "
            "model; use all, or --pipeline-model-parallel-size 1"
        )


def has_experts(index: int, experts: int | None, frequency: int | Sequence[int]) -> bool:
    """Whether layer ``index``, from 0, is a mixture of ``experts``; ``frequency`` as in ``--moe-layer-freq``."""
    if not experts:
        return False
    return index % frequency == 0 if isinstance(frequency, int) else bool(frequency[index])


def only_experts(experts: int | None, frequency: int | Sequence[int]) -> bool:
    """Whether every layer is a mixture of experts."""
    return bool(experts) and (frequency == 1 if isinstance(frequency, int) else all(frequency))


def check_fp8_attention(mode: str, schedule: HeadSchedule, *, tokens: int, ring_size: int, head_dim: int) -> None:
    """Raises UPipeError unless FP8 kernels take blocks of ``tokens`` = L tokens, with a ring also halves of them, and a
    rank's heads of a stage. On every device alike, so that a CPU says what a GPU would."""
    if mode == "off":
        return
    unit = FP8_ATTENTION_TOKENS * (2 if ring_size > 1 else 1)
    if tokens % unit:
        raise UPipeError(
            f"--upipe-fp8-attention {mode} needs multiples of {unit} tokens on a ring rank (--seq-length / R), not "
            f"{tokens}; the nearest is {max(1, round(tokens / unit)) * unit}"
        )
    for what, heads in (("query", schedule.heads_per_rank), ("KV", schedule.kv_per_rank)):
        if mode == "full" and heads * head_dim % FP8_ATTENTION_WIDTH:
            raise UPipeError(
                f"--upipe-fp8-attention full needs multiples of {FP8_ATTENTION_WIDTH} numbers in a rank's {what} heads "
                f"of a stage, not {heads} x {head_dim}; raise --upipe-heads-per-stage {schedule.heads_per_stage}, or "
                "use off"
            )


def check_parallelism(
    *,
    query_heads: int,
    kv_heads: int,
    tensor_parallel_size: int,
    context_parallel_size: int,
    hierarchical_sizes: list[int] | None,
    heads_per_stage: int | None,
    sequence_length: int | None,
    sequence_parallel: bool,
) -> None:
    """Raises UPipeError unless heads (of the whole model), groups and sequence length fit together."""
    if query_heads % kv_heads:
        nearest = _nearest_divisor(kv_heads, query_heads)
        raise UPipeError(
            f"--num-query-groups {kv_heads} does not divide {query_heads} query heads; the nearest divisor is {nearest}"
        )
    if kv_heads % tensor_parallel_size:
        nearest = _nearest_divisor(tensor_parallel_size, kv_heads)
        raise UPipeError(
            f"--tensor-model-parallel-size {tensor_parallel_size} does not divide {kv_heads} KV heads "
            f"(--num-query-groups); the nearest that does is {nearest}"
        )
    if hierarchical_sizes:
        check_sizes(hierarchical_sizes, context_parallel_size)
    layout = SequenceLayout(*(hierarchical_sizes or (context_parallel_size, 1)))
    heads = query_heads // tensor_parallel_size, kv_heads // tensor_parallel_size
    fitting = [p for p in fitting_ulysses_sizes(*heads) if context_parallel_size % p == 0]
    if layout.ulysses_size not in fitting:
        nearest = min(fitting, key=lambda p: (abs(p - layout.ulysses_size), p))
        raise UPipeError(
            f"--context-parallel-size {context_parallel_size} with P = {layout.ulysses_size} (Ulysses) does not fit "
            f"{heads[0]} query heads and {heads[1]} KV heads on a tensor-parallel rank; the nearest that does is "
            f"--hierarchical-context-parallel-sizes {nearest} {context_parallel_size // nearest}"
        )
    head_schedule(*heads, layout.ulysses_size, heads_per_stage)
    unit = 2 * layout.size * (tensor_parallel_size if sequence_parallel else 1)
    if sequence_length is not None and sequence_length % unit:
        below, above = sequence_length // unit * unit, (sequence_length // unit + 1) * unit
        nearest = below if below and sequence_length - below <= above - sequence_length else above
        raise UPipeError(
            f"--seq-length {sequence_length} is not a multiple of {unit} (2 x P x R"
            f"{' x tensor-parallel size' if sequence_parallel else ''}); the nearest multiple is {nearest}"
        )


def _nearest_divisor(value: int, of: int) -> int:
    return min((d for d in range(1, of + 1) if of % d == 0), key=lambda d: (abs(d - value), d))


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
