"""Stock and UPipe self-attention side by side: output, input gradient and every weight gradient.

Every rank computes the stock module on the whole sequence by itself; UPipe's runs on the ranks' shards. Gradients are
summed as Megatron's finalize does before they are compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron_upipe.config import UPipeConfig
from megatron_upipe.context.layout import SequenceLayout
from megatron_upipe.integration import cpu

TOLERANCE = 1e-10  # relative, fp64


def device() -> torch.device:
    """Where the modules under test live."""
    return torch.device("cpu") if cpu.is_installed() else torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True)
class Case:
    """One comparison; sizes are pairwise different on purpose."""

    heads: int = 12
    kv_heads: int = 4
    heads_per_stage: int | None = None
    micro_batch: int = 3
    chunk: int = 3  # tokens of half a shard
    head_dim: int = 10
    hidden: int = 28
    config: dict = field(default_factory=dict)
    upipe: dict = field(default_factory=dict)
    rotary_percent: float = 1.0
    mask: str = "causal"


def initialize(p: int, r: int, tp: int = 1) -> None:
    """Megatron's groups for P x R x TP; what is left of the world is data parallel. Collective."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        context_parallel_size=p * r,
        hierarchical_context_parallel_sizes=[p, r] if p * r > 1 else None,
    )
    model_parallel_cuda_manual_seed(1234)


def make_config(case: Case, p: int, r: int, **changes: Any) -> TransformerConfig:
    settings = dict(
        num_layers=1,
        hidden_size=case.hidden,
        ffn_hidden_size=36,
        num_attention_heads=case.heads,
        num_query_groups=case.kv_heads,
        kv_channels=case.head_dim,
        params_dtype=torch.float64,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        normalization="RMSNorm",
        transformer_impl="local",
        context_parallel_size=p * r,
        hierarchical_context_parallel_sizes=[p, r] if p * r > 1 else None,
    )
    config = TransformerConfig(**{**settings, **case.config, **changes})
    config.upipe = UPipeConfig(heads_per_stage=case.heads_per_stage, **case.upipe)
    return config


def groups_of_one() -> dist.ProcessGroup:
    """This rank's group of itself. Collective over the world."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def single_rank_groups(alone: dist.ProcessGroup | None = None) -> ProcessGroupCollection:
    """Groups for a reference that every rank computes alone; collective over the world unless ``alone`` is given."""
    alone = groups_of_one() if alone is None else alone
    groups = ProcessGroupCollection.use_mpu_process_groups()
    for name in ("tp", "cp", "tp_cp", "dp", "dp_cp", "pp", "mp", "ep"):
        setattr(groups, name, alone)
    groups.hcp = None
    return groups


def with_mask(spec: ModuleSpec, case: Case) -> ModuleSpec:
    return replace(spec, params={**spec.params, "attn_mask_type": AttnMaskType[case.mask]})


def stock_attention(case: Case, groups: ProcessGroupCollection) -> torch.nn.Module:
    """Megatron's own self-attention on the whole sequence and all heads."""
    config = make_config(case, 1, 1, tensor_model_parallel_size=1, sequence_parallel=False)
    submodules = get_gpt_layer_local_submodules(
        qk_layernorm=config.qk_layernorm, qk_l2_norm=config.qk_l2_norm, normalization=config.normalization
    )
    torch.manual_seed(7)
    spec = with_mask(submodules.self_attention, case)
    module = build_module(spec, config=config, layer_number=1, pg_collection=groups).double().to(device())
    _randomise(module)
    return module


def upipe_attention(
    case: Case, p: int, r: int, stock: torch.nn.Module, tp: int = 1, sp: bool = False
) -> torch.nn.Module:
    """UPipe's self-attention with this tensor-parallel rank's part of the stock module's weights."""
    from megatron_upipe.layers.transformer_layer import upipe_submodules

    config = make_config(case, p, r, tensor_model_parallel_size=tp, sequence_parallel=sp)
    spec = with_mask(upipe_submodules(config, 0).self_attention, case)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    module = build_module(spec, config=config, layer_number=1, pg_collection=groups).double().to(device())
    names = dict(module.named_parameters())
    assert set(names) == set(dict(stock.named_parameters())), "parameter names are Megatron's"
    with torch.no_grad():
        for name, whole in stock.named_parameters():
            names[name].copy_(tp_shard(name, whole, tp))
    return module


def tp_shard(name: str, whole: torch.Tensor, tp: int) -> torch.Tensor:
    """This rank's part of a parameter of self-attention or of a layer with a gated MLP, or of its gradient."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    if "linear_fc1." in name:  # gate and up halves are split each
        return torch.cat([half.chunk(tp)[rank] for half in whole.chunk(2)])
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return whole.chunk(tp, 1)[rank]
    return whole.chunk(tp)[rank] if "linear_qkv." in name or name.endswith("softmax_offset") else whole


def _randomise(module: torch.nn.Module) -> None:
    """Norm weights, biases and sinks that are not ones and zeros."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name or name.endswith(("bias", "softmax_offset")):
                parameter.add_(torch.randn_like(parameter) * 0.3)


def rotary_table(case: Case, length: int) -> torch.Tensor:
    rotary = RotaryEmbedding(case.head_dim, rotary_percent=case.rotary_percent, use_cpu_initialization=True)
    return rotary.get_emb(length).to(device())


def local(tensor: torch.Tensor, layout: SequenceLayout, rank: int) -> torch.Tensor:
    """Rank's tokens of a whole [S, ...] tensor."""
    positions = [i for half in layout.positions(rank, tensor.shape[0]) for i in half]
    return tensor[positions]


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Infinite if there is anything but finite numbers; never raises, so that the other ranks are not left waiting."""
    if found.shape != wanted.shape or not torch.isfinite(found).all():
        return math.inf
    return ((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-300)).item()


def inputs(case: Case, layout: SequenceLayout, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x and dy [S, b, hidden] and the RoPE table, whole and the same on every rank."""
    length = 2 * layout.size * case.chunk
    generator = torch.Generator().manual_seed(11)
    shape = (length, case.micro_batch, case.hidden)
    x, dy = (torch.randn(shape, dtype=torch.float64, generator=generator).to(device(), dtype) for _ in range(2))
    return x, dy, rotary_table(case, length)


def finalized(name: str, gradient: torch.Tensor, tp_sum: bool | None = None) -> torch.Tensor:
    """A weight gradient summed over the context-parallel group, and over the tensor-parallel group if ``tp_sum``.

    By default that is for norms, which in an attention module are those of q and k. Collective.
    """
    gradient = gradient.double()
    dist.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
    if "layernorm" in name if tp_sum is None else tp_sum:
        dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
    return gradient


def compare(
    case: Case, p: int, r: int, groups: ProcessGroupCollection, tp: int = 1, sp: bool = False, strided: bool = False
) -> dict[str, float]:
    """Relative errors of output, dx and every weight gradient, summed as Megatron's finalize does. Collective.

    ``strided``: x and dy are views that are not contiguous.
    """
    layout, rank = SequenceLayout(p, r), parallel_state.get_context_parallel_rank()
    stock = stock_attention(case, groups)
    upipe = upipe_attention(case, p, r, stock, tp, sp)
    x, dy, table = inputs(case, layout, torch.float64)
    gather_late(upipe)

    def mine(tensor: torch.Tensor) -> torch.Tensor:
        shard = local(tensor, layout, rank)
        shard = shard.chunk(tp)[parallel_state.get_tensor_model_parallel_rank()] if sp else shard
        return shard.transpose(0, 1).contiguous().transpose(0, 1) if strided else shard.contiguous()

    whole = x.clone().requires_grad_()
    wanted, wanted_bias = stock(whole, None, rotary_pos_emb=table)
    wanted.backward(dy)
    shard = mine(x).requires_grad_()
    found, bias = upipe(shard, None, rotary_pos_emb=local(table, layout, rank))
    found.backward(mine(dy))

    errors = {
        "output": relative_error(found.detach(), mine(wanted.detach())),
        "dx": relative_error(shard.grad, mine(whole.grad)),
    }
    assert (bias is None) == (wanted_bias is None)
    gradients = dict(upipe.named_parameters())
    for name, parameter in stock.named_parameters():
        if parameter.grad is None:  # the output bias is handed on, not added
            assert gradients[name].grad is None
            continue
        errors[name] = relative_error(finalized(name, gradients[name].grad), tp_shard(name, parameter.grad, tp))
    return errors


def compare_low_precision(
    case: Case, p: int, r: int, groups: ProcessGroupCollection, dtype: torch.dtype = torch.bfloat16
) -> dict[str, tuple[float, float]]:
    """For each result (error of UPipe, error of stock), both in ``dtype``, against stock in fp64, in the 2-norm.

    Stock is Megatron's module with explicit softmax or with torch's flash attention, whichever errs more. A weight
    gradient leaves each rank in ``dtype``; the error of stock includes what that rounding of the ranks' exact parts
    costs, since every context parallelism pays it. Collective.
    """
    layout, rank = SequenceLayout(p, r), parallel_state.get_context_parallel_rank()
    x, dy, table = inputs(case, layout, dtype)
    exact = stock_attention(case, groups)
    with torch.no_grad():  # weights that the low precision holds exactly
        for parameter in exact.parameters():
            parameter.copy_(parameter.to(dtype))
    plain, flash = stock_attention(case, groups), stock_attention(case, groups)
    upipe, parts = (upipe_attention(case, p, r, exact) for _ in range(2))
    for module in (plain, flash):
        module.load_state_dict(exact.state_dict())
    flash.core_attention = _Flash(case, upipe.plan.scale)

    def mine(tensor: torch.Tensor) -> torch.Tensor:
        return local(tensor, layout, rank)

    found = []
    runs = ((exact, torch.float64), (parts, torch.float64), (plain, dtype), (flash, dtype), (upipe, dtype))
    for module, precision in runs:
        module.to(precision)
        sharded = module is upipe or module is parts
        pick = mine if sharded else _whole
        leaf = pick(x).to(precision, copy=True).requires_grad_()
        y = module(leaf, None, rotary_pos_emb=pick(table))[0]
        y.backward(pick(dy).to(precision))
        cut = _whole if sharded else mine
        results = {"output": cut(y.detach()).double(), "dx": cut(leaf.grad).double()}
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                results[name] = finalized(name, parameter.grad.to(dtype)) if sharded else parameter.grad.double()
        found.append(results)
    wanted, *others = found
    errors = {}
    for name, w in wanted.items():
        rounding, explicit, fused, ours = (((other[name] - w).norm() / w.norm()).item() for other in others)
        stock = max(explicit, fused)
        errors[name] = (ours, stock if name in ("output", "dx") else stock + rounding)
    return errors


class _Flash(torch.nn.Module):
    """Core attention of the stock module through torch's flash attention: [s, b, heads, d] -> [s, b, heads*d]."""

    def __init__(self, case: Case, scale: float) -> None:
        super().__init__()
        self.causal, self.scale = case.mask == "causal", scale

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        heads = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        out = F.scaled_dot_product_attention(*heads, is_causal=self.causal, scale=self.scale, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2).contiguous()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def gather_late(module: torch.nn.Module) -> None:
    """Takes the linears' weights away and brings them back in a hook of the module's call, as DDP and FSDP do.

    A weight that is read without the call is NaN.
    """
    for linear in (module.linear_qkv, module.linear_proj):
        whole = linear.weight.detach().clone()

        def gather(linear: torch.nn.Module, args: tuple, whole: torch.Tensor = whole) -> None:
            linear.weight.data.copy_(whole)

        linear.weight.data.fill_(torch.nan)
        linear.register_forward_pre_hook(gather)
