"""What one attention call is made of: plan, weights, elementwise functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megatron_upipe.attention.rotate import Rotation
from megatron_upipe.attention.schedule import HeadSchedule
from megatron_upipe.context.groups import ContextGroups
from megatron_upipe.context.transport import TorchTransport, Transport
from megatron_upipe.kernels.protocol import Kernel
from megatron_upipe.precision.plain import PLAIN
from megatron_upipe.precision.protocol import Precision, Weight


@dataclass(frozen=True)
class AttentionPlan:
    """What does not change from call to call."""

    schedule: HeadSchedule
    groups: ContextGroups
    kernel: Kernel
    head_dim: int
    scale: float
    causal: bool
    window: int | None = None
    """Of causal attention: tokens before its own that a query sees; None: all."""
    output_gate: bool = False
    fuse_weight_gradients: bool = False
    precision: Precision = PLAIN
    """Of the layer's matrix products; the MLP's as well."""
    overlap: bool = False
    """Whether exchanges go on beside the attention of other stages."""
    copy_engines: Transport | None = None
    """Takes the place of torch.distributed in the exchange."""

    @property
    def transport(self) -> Transport | None:
        """Of the exchange; None where the Ulysses group is one rank."""
        ulysses = self.groups.ulysses
        return self.copy_engines or (None if ulysses is None else TorchTransport(ulysses))

    def describe(self) -> str:
        """One line for the log: heads, stages, U, P, R, kernel."""
        s = self.schedule
        window = "" if self.window is None else f", window {self.window}"
        exchange = "no exchange"
        if self.transport is not None:
            exchange = (
                f"exchange by {self.transport.name}, {'beside' if self.overlap else 'before and after'} attention"
            )
        return (
            f"{s.query_heads} query and {s.kv_heads} KV heads of size {self.head_dim} per tensor-parallel rank, "
            f"{len(s.stages)} stages of U = {s.heads_per_stage} heads, P = {s.ulysses_size} (Ulysses) x "
            f"R = {self.groups.layout.ring_size} (ring), kernel {self.kernel.name}{window}, {exchange}"
        )


class AttentionParameters(NamedTuple):
    """Megatron's parameters of this tensor-parallel rank; with output gates 2g stands for g."""

    qkv: Tensor  # [K*(g+2)*d, hidden]
    qkv_bias: Tensor | None  # [K*(g+2)*d]
    proj: Tensor  # [hidden, H*d]
    sinks: Tensor | None = None  # [H]


@dataclass(frozen=True)
class AttentionWeights:
    """The same as one pass, forward or backward, reads them."""

    qkv: Weight
    qkv_bias: Tensor | None
    proj: Weight
    sinks: Tensor | None = None

    @classmethod
    def of(cls, parameters: AttentionParameters, precision: Precision) -> AttentionWeights:
        qkv, bias, proj, sinks = parameters
        return cls(Weight(qkv, precision), bias, Weight(proj, precision), sinks)


@dataclass(frozen=True)
class Elementwise:
    """Norm and RoPE of one call, [s, b, n, d] -> the same shape, on this rank's tokens.

    ``parameters`` are the norms' weights and biases, whose gradients are wanted in that order; both functions take
    others in their place as a second argument (None: their own). ``linear``: the functions are linear (RoPE alone), so
    that their backward does not need the input.
    """

    query: Callable[[Tensor, Sequence[Tensor] | None], Tensor]
    key: Callable[[Tensor, Sequence[Tensor] | None], Tensor]
    parameters: tuple[Tensor, ...] = ()
    linear: bool = False
    rotation: Callable[[], Rotation] | None = None
    """Makes RoPE of the queries for one pass, where that is all of ``query`` and a kernel writes it where the exchange
    packs them."""
