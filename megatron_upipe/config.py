"""UPipeConfig: every setting of the plug-in.

Layers read ``config.upipe`` on Megatron's TransformerConfig and never Megatron's global arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_upipe.errors import UPipeError

ROPE_MODES = ("stock", "exact")
STORES = ("none", "host")
PACKED_LAYOUTS = ("document", "sequence")
PREFETCH_MODES = ("auto", "on", "off")
OVERLAP_MODES = ("on", "off")
EXCHANGES = ("nccl", "fast-ulysses", "auto")
FP8_ATTENTION_MODES = ("off", "forward", "full")
# Megatron's fp32 RoPE angles are off by an error that grows with the position (see attention/rotary.py).
EXACT_ROPE_FROM = 128 * 1024


@dataclass(frozen=True)
class RotarySettings:
    """What Megatron's RotaryEmbedding is built from; needed to compute exact angles."""

    base: float = 10000.0
    percent: float = 1.0
    llama3_scaling_factor: float | None = None  # None: no scaling
    interpolation_factor: float | None = None


@dataclass(frozen=True)
class UPipeConfig:
    """Settings of UPipe, the same on all ranks. Set as ``upipe`` on the TransformerConfig."""

    heads_per_stage: int | None = None
    """U: query heads of a stage over the Ulysses group; None means P, the smallest stages."""
    attention_backend: str = "auto"
    """Name of a kernel (``kernels/select.py``), or ``auto``: the fastest that serves the inputs."""
    fp8_attention: str = "off"
    """In layers whose products are in FP8: ``forward``, attention's forward in FP8 too (Hopper); ``full``, its backward
    as well (MXFP8, Blackwell)."""
    overlap: str = "off"
    """``on``: exchanges go on beside the attention of other stages, at the cost of one more stage's tensors."""
    exchange: str = "nccl"
    """What carries it: ``nccl`` (torch.distributed, on CPUs gloo), ``fast-ulysses`` (copy engines), or ``auto``: that
    where it is installed and serves."""
    rope: str = "stock"
    """``stock``: Megatron's fp32 angles. ``exact``: angles in fp64, reduced modulo 2 pi; needs ``rotary``."""
    rotary: RotarySettings | None = None
    keep_attention: int | None = None
    """Layers, of the whole model, whose attention output waits for backward; the others compute attention again. None:
    all of them."""
    offload: str = "none"
    """Where layer inputs and kept attention wait: ``none``, on the device; ``host``, in pinned host memory."""
    prefetch: str = "auto"
    """With ``host``: whether a layer's input is fetched one layer ahead, at the cost of its bytes once more. ``auto``:
    where the device has room."""
    checkpoint_every: int = 1
    """Every how many layers the input is kept; the others' are made again."""
    mlp_tile_tokens: int = 4096
    """Tokens of a tile of the MLP."""
    packed_layout: str = "document"
    """How packed documents lie on the ranks: ``document``, each in a zigzag of its own, as TransformerEngine has it and
    ``--sft`` makes them; ``sequence``, one zigzag over all, as ``--dataloader-inter-document-masking`` does."""
    loss_tile_tokens: int = 1024
    """Tokens of a tile of the output layer and loss; 0: Megatron's own, with all logits at once."""

    def __post_init__(self) -> None:
        _check_choice("--upipe-offload", self.offload, STORES)
        _check_choice("--upipe-fp8-attention", self.fp8_attention, FP8_ATTENTION_MODES)
        _check_choice("--upipe-overlap", self.overlap, OVERLAP_MODES)
        _check_choice("--upipe-exchange", self.exchange, EXCHANGES)
        _check_choice("--upipe-prefetch", self.prefetch, PREFETCH_MODES)
        _check_choice("UPipeConfig.packed_layout", self.packed_layout, PACKED_LAYOUTS)
        check_least("--upipe-keep-attention", self.keep_attention, 0)
        check_least("--upipe-checkpoint-every", self.checkpoint_every, 1)
        check_least("--upipe-mlp-tile-tokens", self.mlp_tile_tokens, 1)
        check_least("--upipe-loss-tile-tokens", self.loss_tile_tokens, 0)
        _check_choice("--upipe-rope", self.rope, ROPE_MODES)
        if self.rope == "exact" and self.rotary is None:
            raise UPipeError("--upipe-rope exact needs the rotary settings; set UPipeConfig.rotary, or use stock")

    def describe(self) -> str:
        """One line for the log: what is kept, where, and in which tiles."""
        kept = {None: "all layers", 0: "no layer"}.get(self.keep_attention, f"{self.keep_attention} layers")
        every = "" if self.checkpoint_every == 1 else f"{_ordinal(self.checkpoint_every)} "
        place = "in host memory" if self.offload == "host" else "on the device"
        loss = f"{self.loss_tile_tokens} tokens" if self.loss_tile_tokens else "none (Megatron's own)"
        return (
            f"attention kept in {kept}, the input of every {every}layer, {place}; MLP tiles {self.mlp_tile_tokens} "
            f"tokens, loss tiles {loss}"
        )


def keeps_attention(keep: int | None, model_layers: int, first: int, layers: int, index: int) -> bool:
    """Whether layer ``index`` keeps its attention: ``keep`` layers of the model, spread over its pipeline stages.

    The layer's stage holds ``layers`` layers from ``first`` on, all counted from 0. Its last layers keep: their
    backward comes first, so that the memory is free again when the others need it to compute attention again.
    """
    if keep is None:
        return True
    here = keep * (first + layers) // model_layers - keep * first // model_layers
    return index >= first + layers - here


def _check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UPipeError(f"{flag} {value} does not exist; choose {' or '.join(choices)}")


def check_least(flag: str, value: int | None, least: int) -> None:
    """Raises UPipeError for a value below ``least``; None is no value."""
    if value is not None and value < least:
        raise UPipeError(f"{flag} {value} is too small; the least is {least}")


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
