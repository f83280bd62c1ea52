"""UPipeSelfAttention: Megatron's SelfAttention with its parameters, names and initialisation, computed by UPipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_upipe.attention.elementwise import apply_norm
from megatron_upipe.attention.function import AttentionCall, UPipeAttentionFunction
from megatron_upipe.attention.linears import UPipeColumnParallelLinear, given, parameters_of
from megatron_upipe.attention.plan import AttentionParameters, AttentionPlan, Elementwise
from megatron_upipe.attention.rotary import angles_of_documents, exact_angles, exact_table
from megatron_upipe.attention.rotate import Rotation, serves
from megatron_upipe.attention.schedule import head_schedule
from megatron_upipe.attention.sinks_module import SinksOnly
from megatron_upipe.attention.tensor_parallel import tensor_parallel
from megatron_upipe.checks import check_fp8_attention, check_fp8_sizes, check_model, check_parallelism, only_experts
from megatron_upipe.config import UPipeConfig
from megatron_upipe.context.fast_ulysses import copy_engines
from megatron_upipe.context.groups import ContextGroups, context_groups
from megatron_upipe.context.packing import PackedBatches
from megatron_upipe.context.segments import Segments, one_document
from megatron_upipe.errors import UPipeError
from megatron_upipe.kernels.protocol import Kernel
from megatron_upipe.kernels.select import AUTO, fp8_kernel, passed_over, select_kernel
from megatron_upipe.precision.recipes import check_alignment, layer_recipe
from megatron_upipe.precision.select import select_precision


class UPipeSelfAttention(SelfAttention):
    """Self-attention [s/TP or s, b, hidden] -> the same shape and the output bias.

    With one context-parallel rank, the stock attention runs. Settings come from ``config.upipe`` (a UPipeConfig).
    Building it raises UPipeError for what is not supported; it is not collective.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        self.upipe: UPipeConfig = getattr(config, "upipe", None) or UPipeConfig()
        groups = _context_groups(config, pg_collection)
        layout = groups.layout
        self.context_parallel = layout.size > 1
        check_parallelism(
            query_heads=config.num_attention_heads,
            kv_heads=config.num_query_groups,
            tensor_parallel_size=config.tensor_model_parallel_size,
            context_parallel_size=layout.size,
            hierarchical_sizes=[layout.ulysses_size, layout.ring_size],
            heads_per_stage=self.upipe.heads_per_stage,
            sequence_length=None,
            sequence_parallel=config.sequence_parallel,
        )
        if self.context_parallel:
            check_model(config)
            if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask):
                raise UPipeError(f"attention mask type {attn_mask_type.name} is not supported by UPipe; use causal")
            # Megatron's own refuses context parallelism or would go unused
            te = getattr(submodules.core_attention, "__name__", "").startswith("TE")
            submodules = replace(submodules, core_attention=partial(SinksOnly, te=te))
        elif config.fp8 and submodules.linear_qkv is UPipeColumnParallelLinear:
            raise UPipeError(
                f"--fp8-format {config.fp8} with --context-parallel-size 1 needs TransformerEngine's linears; use "
                "--spec megatron_upipe.layer_specs upipe_te_layer_spec"
            )
        super().__init__(
            config=config,
            submodules=submodules,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
            **kwargs,
        )
        self.groups = groups
        self.recipe = layer_recipe(config, layer_number) if self.context_parallel else None
        self.shards = self.world_size if config.sequence_parallel else 1
        self._announced = self._given_kernel = False
        self._kernel_inputs: tuple | None = None  # what the plan's kernel was chosen for
        if self.context_parallel:
            self.plan = self._make_plan(groups)
        if self.recipe is not None:
            check_fp8_sizes(
                self.recipe,
                self.plan.schedule,
                hidden=config.hidden_size,
                ffn=(
                    None
                    if only_experts(config.num_moe_experts, config.moe_layer_freq)
                    else config.ffn_hidden_size // self.world_size
                ),
                head_dim=self.hidden_size_per_attention_head,
            )
            if self.plan.window is not None and self.upipe.fp8_attention != "off":
                raise UPipeError(
                    f"--upipe-fp8-attention {self.upipe.fp8_attention} does not work with --window-size; use off"
                )

    def describe(self) -> str:
        """The active plan in one line; the kernel is that of the last call."""
        if not self.context_parallel:
            return f"one context-parallel rank: Megatron's own attention, rope {self.upipe.rope}"
        precision = f", products in {self.plan.precision.describe()}" if self.recipe is not None else ""
        return f"{self.plan.describe()}, rope {self.upipe.rope}{precision}"

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        rotary_pos_cos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        sequence_len_offset: int | None = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As Megatron's; collective over the tensor- and context-parallel groups when P*R > 1."""
        others = {
            "key_value_states": key_value_states,
            "rotary_pos_cos": rotary_pos_cos,
            "rotary_pos_sin": rotary_pos_sin,
            "rotary_pos_cos_sin": rotary_pos_cos_sin,
            "attention_bias": attention_bias,
            "packed_seq_params": packed_seq_params,
            "sequence_len_offset": sequence_len_offset,
        }
        inference = inference_context if inference_context is not None else inference_params
        if not self.context_parallel:
            self._announce_once()
            if self.upipe.rope == "exact" and inference is None:
                tokens = hidden_states.shape[0] * self.shards
                if packed_seq_params is not None:  # Megatron takes from its table what each document needs
                    tokens = max(packed_seq_params.max_seqlen_q, packed_seq_params.max_seqlen_kv)
                rotates, how = self._rotates(rotary_pos_emb), (*self._exact_rotary(), hidden_states.device)
                rotary_pos_emb = exact_table(tokens, *how) if rotates else None
            return super().forward(
                hidden_states, attention_mask, inference_context=inference, rotary_pos_emb=rotary_pos_emb, **others
            )
        packed = others.pop("packed_seq_params")
        refuse_arguments(attention_mask, inference, others)
        call = self.call(hidden_states, rotary_pos_emb, packed)
        output = UPipeAttentionFunction.apply(
            torch.is_grad_enabled(), call, hidden_states, *call.parameters(), *call.elementwise.parameters
        )
        return output, given(self.linear_proj.bias)

    def call(self, hidden_states: Tensor, rotary_pos_emb: Any, packed: Any = None) -> AttentionCall:
        """What computes attention of these tokens, [s/TP or s, b, hidden], with b = 1 if they are ``packed``.

        Collective over the context-parallel group: the first time, and once for each packed micro-batch.
        """
        self._use_kernel_for(hidden_states)
        tokens, micro_batch = hidden_states.shape[0] * self.shards, hidden_states.shape[1]
        if self.recipe is not None:
            self._check_fp8_tokens(tokens, micro_batch)
        segments = self._segments(packed, tokens, micro_batch, hidden_states.device)
        sums = tensor_parallel(self.pg_collection.tp, self.world_size, self.shards > 1)
        return AttentionCall(
            plan=self.plan,
            elementwise=self._elementwise(rotary_pos_emb, segments, hidden_states.device, packed is not None),
            parameters=self._attention_parameters,
            gather=sums.gather,
            reduce=sums.reduce,
            segments=segments,
            tensor_parallel_size=self.world_size,
        )

    def _segments(self, packed: Any, tokens: int, micro_batch: int, device: torch.device) -> Segments:
        layout = self.groups.layout
        if packed is None:
            return one_document(layout, tokens * layout.size)
        if micro_batch > 1:
            raise UPipeError(
                f"packed documents come as one sequence, not as a micro-batch of {micro_batch}; put the samples one "
                "after the other (megatron.core.utils.flatten_batch_for_packed_sequences)"
            )
        if self.recipe is not None and self.upipe.fp8_attention != "off":
            raise UPipeError(f"--upipe-fp8-attention {self.upipe.fp8_attention} takes no packed documents; use off")
        per_document = self.upipe.packed_layout == "document"
        return _packed_batches.segments(packed, self.groups, tokens, per_document, device)

    def _check_fp8_tokens(self, tokens: int, micro_batch: int) -> None:
        check_alignment(self.recipe, {"the tokens of a rank": tokens * micro_batch})
        layout = self.groups.layout
        check_fp8_attention(
            self.upipe.fp8_attention,
            self.plan.schedule,
            tokens=tokens * layout.ulysses_size,
            ring_size=layout.ring_size,
            head_dim=self.hidden_size_per_attention_head,
        )

    def _make_plan(self, groups: ContextGroups) -> AttentionPlan:
        config = self.config
        head_dim = self.hidden_size_per_attention_head
        weight = self.linear_qkv.weight
        return AttentionPlan(
            schedule=head_schedule(
                self.num_attention_heads_per_partition,
                self.num_query_groups_per_partition,
                groups.layout.ulysses_size,
                self.upipe.heads_per_stage,
            ),
            groups=groups,
            # weights may be made elsewhere than they are used: the first call chooses
            kernel=select_kernel(weight.device, weight.dtype, head_dim),
            head_dim=head_dim,
            scale=config.softmax_scale if config.softmax_scale is not None else 1 / math.sqrt(head_dim),
            causal=self.attn_mask_type == AttnMaskType.causal,
            window=self._window(),
            output_gate=config.attention_output_gate,
            fuse_weight_gradients=config.gradient_accumulation_fusion,
            overlap=self.upipe.overlap == "on",
        )

    def _window(self) -> int | None:
        """Tokens before its own that a query of this layer sees."""
        config = self.config
        if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number):
            return None
        if self.attn_mask_type != AttnMaskType.causal:
            raise UPipeError(f"--window-size with attention mask type {self.attn_mask_type.name}; use causal")
        return None if config.window_size[0] < 0 else config.window_size[0]

    def _use_kernel_for(self, x: Tensor) -> None:
        """Layers may move to another device or dtype after they are built; the kernel follows."""
        inputs = (x.device, x.dtype, self.plan.head_dim)
        if inputs == self._kernel_inputs or self._given_kernel:
            return
        self._kernel_inputs = inputs
        self.groups.connect(x.device)
        name, deterministic = self.upipe.attention_backend, self.config.deterministic_mode
        base = kernel = select_kernel(*inputs, name, deterministic, self.plan.window is not None)
        if self.recipe is not None:
            kernel = fp8_kernel(self.upipe.fp8_attention, base, *inputs, deterministic)
        precision = select_precision(self.recipe, x.device, x.dtype)
        transport = copy_engines(self.upipe.exchange, self.groups.ulysses, x.device, x.dtype)
        self.plan = replace(self.plan, kernel=kernel, precision=precision, copy_engines=transport)
        _announce(self.describe())
        reasons = passed_over(base, *inputs, self.plan.window is not None) if x.is_cuda and name == AUTO else []
        if reasons:
            _announce(f"attention backends passed over: {'; '.join(reasons)}")

    def use_kernel(self, kernel: Kernel) -> None:
        """Computes attention by ``kernel`` from now on, whatever the inputs; for simulations."""
        self.plan = replace(self.plan, kernel=kernel)
        self._given_kernel = True

    def use_overlap(self, on: bool) -> None:
        """Whether exchanges go on beside attention from now on; the same on all ranks."""
        self.plan = replace(self.plan, overlap=on)

    def _announce_once(self) -> None:
        """Not again at every call: the line is only made when the plan is new."""
        if not self._announced:
            self._announced = True
            _announce(self.describe())

    def _attention_parameters(self) -> AttentionParameters:
        """The parameters, through their modules' calls."""
        qkv, bias = parameters_of(self.linear_qkv, "linear_qkv")
        proj, _ = parameters_of(self.linear_proj, "linear_proj")
        return AttentionParameters(qkv, bias, proj, self.core_attention())

    def _elementwise(self, rotary_pos_emb: Any, segments: Segments, device: torch.device, packed: bool) -> Elementwise:
        """q/k norm and RoPE of this call's tokens."""
        angles = self._angles(rotary_pos_emb, segments, device, packed)
        q_parameters, k_parameters = _parameters(self.q_layernorm), _parameters(self.k_layernorm)
        count = len(q_parameters)
        scale = _yarn_get_concentration_factor_from_config(self.config)

        def rotate(t: Tensor, freqs: Tensor | None) -> Tensor:
            if freqs is None:
                return t
            return apply_rotary_pos_emb(t, freqs, config=self.config, mscale=scale, cp_group=self.pg_collection.cp)

        def query(t: Tensor, parameters: Sequence[Tensor] | None) -> Tensor:
            return rotate(apply_norm(self.q_layernorm, t, parameters and parameters[:count]), angles[0])

        def key(t: Tensor, parameters: Sequence[Tensor] | None) -> Tensor:
            return rotate(apply_norm(self.k_layernorm, t, parameters and parameters[count:]), angles[1])

        return Elementwise(
            query=query,
            key=key,
            parameters=(*q_parameters, *k_parameters),
            linear=self.q_layernorm is None and self.k_layernorm is None,
            rotation=self._rotation(angles[0], scale),
        )

    def _rotation(self, angles: Tensor | None, scale: float) -> Callable[[], Rotation] | None:
        """Of queries without norm, where a kernel serves; rounded as Megatron's own, or its fused, RoPE does."""
        config = self.config
        if (
            angles is None
            or self._kernel_inputs is None
            or self.q_layernorm is not None
            or self.k_layernorm is not None
        ):
            return None
        device, dtype, head_dim = self._kernel_inputs
        if config.rotary_interleaved or not serves(device, dtype, head_dim, angles.shape[-1]):
            return None
        return partial(Rotation.of, angles, scale, torch.float32 if config.apply_rope_fusion else dtype)

    def _angles(
        self, rotary_pos_emb: Any, segments: Segments, device: torch.device, packed: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """RoPE angles of queries and keys, [s, 1, 1, rotary_dim] each; None for layers without RoPE.

        For packed documents Megatron hands over those of one document, from its beginning.
        """
        if not self._rotates(rotary_pos_emb):
            return None, None
        tables = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
        if self.upipe.rope == "stock":
            return tuple(angles_of_documents(t, segments, self.groups.rank) for t in tables) if packed else tables
        angles = exact_angles(segments, self.groups.rank, *self._exact_rotary(), device)
        return angles, angles

    def _rotates(self, rotary_pos_emb: Any) -> bool:
        """Whether this layer has RoPE."""
        without = self.config.no_rope_freq and self.config.no_rope_freq[self.layer_number - 1]
        return rotary_pos_emb is not None and not without

    def _exact_rotary(self) -> tuple:
        """Settings of exact angles, head size, interleaved."""
        return self.upipe.rotary, self.hidden_size_per_attention_head, self.config.rotary_interleaved


def refuse_arguments(attention_mask: Tensor | None, inference: Any, given: dict[str, Any]) -> None:
    """Raises UPipeError for arguments of a forward call that UPipe with context parallelism cannot honour."""
    if inference is not None:
        raise UPipeError(
            "inference with context parallelism is not supported by UPipe; generate with the stock spec, from the "
            "same checkpoint"
        )
    if attention_mask is not None:
        raise UPipeError(
            "an attention mask was given to UPipe, which applies the causal mask itself; "
            "pass --no-create-attention-mask-in-dataloader"
        )
    for name, value in given.items():
        if value is not None:
            raise UPipeError(f"{name} is not supported by UPipe with context parallelism; pass None")


def _parameters(norm: torch.nn.Module | None) -> list[Tensor]:
    return [] if norm is None else list(norm.parameters())


def _context_groups(config: TransformerConfig, pg_collection: Any) -> ContextGroups:
    """From the collection that Megatron hands down, or from its global state for callers that give none."""
    sizes = config.hierarchical_context_parallel_sizes
    hierarchical = getattr(pg_collection, "hcp", None)
    if hierarchical is None and sizes:
        hierarchical = parallel_state.get_hierarchical_context_parallel_groups(check_initialized=False)
    context = getattr(pg_collection, "cp", None) or parallel_state.get_context_parallel_group()
    return context_groups(context, hierarchical, sizes)


_packed_batches = PackedBatches()
_announced: set[str] = set()


def _announce(plan: str) -> None:
    """Prints each plan once, on rank 0."""
    if plan not in _announced and torch.distributed.get_rank() == 0:
        print(f"megatron_upipe: {plan}", flush=True)
    _announced.add(plan)
