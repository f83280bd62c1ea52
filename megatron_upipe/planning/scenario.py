"""One training run to be simulated: model, ranks, method, policy."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from megatron_upipe.attention.schedule import HeadSchedule, head_schedule
from megatron_upipe.checks import check_parallelism
from megatron_upipe.config import EXACT_ROPE_FROM, check_least
from megatron_upipe.context.layout import SequenceLayout
from megatron_upipe.context.segments import Segments
from megatron_upipe.errors import UPipeError
from megatron_upipe.planning.documents import fill, segments_of
from megatron_upipe.planning.models import ModelShape
from megatron_upipe.planning.states import SHARDINGS, States, states

AUTHORS = "authors"
METHODS = ("ring", "ulysses", "usp", "upipe", AUTHORS)


@dataclass(frozen=True)
class Scenario:
    """``ulysses`` None: the context-parallel ranks that ``ring`` leaves; ``rope`` None: by the length."""

    model: ModelShape
    gpus: int
    tokens: int
    method: str = "upipe"
    gpus_per_node: int = 8
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    ulysses: int | None = None
    ring: int = 1
    heads_per_stage: int | None = None
    keep_attention: int | None = None
    offload: str = "host"
    prefetch: str = "off"
    checkpoint_every: int = 1
    overlap: str = "off"
    mlp_tile_tokens: int = 4096
    loss_tile_tokens: int = 1024
    attention_backend: str = "flash-attn-3"
    sharding: str = "megatron-fsdp"
    optimizer_on_host: bool = False
    rope: str | None = None
    documents: tuple[int, ...] | None = None
    """Lengths of packed documents, again and again until the sequence is full; None: not packed."""
    packed_layout: str = "document"

    @property
    def lengths(self) -> list[int] | None:
        """Of all documents of the sequence."""
        return None if self.documents is None else fill(self.documents, self.tokens)

    @property
    def segments(self) -> Segments:
        """Who holds which document. Raises UPipeError for lengths that do not fit."""
        return segments_of(self.lengths, SequenceLayout(*self.sizes), self.tokens, self.packed_layout == "document")

    @property
    def rotary(self) -> str:
        """Angles as UPipe takes them by default."""
        return self.rope or ("exact" if self.tokens >= EXACT_ROPE_FROM else "stock")

    def normalised(self, layers: int) -> Scenario:
        """The one scenario for all whose step of ``layers`` simulated layers is the same."""
        (p, r), total = self.sizes, self.model.layers
        kept = self.kept(layers)
        return replace(
            self,
            ulysses=p,
            ring=r,
            keep_attention=None if kept == layers else kept and kept * total // layers,
            checkpoint_every=min(self.checkpoint_every, layers),
            gpus_per_node=8,
            sharding="megatron-fsdp",
            optimizer_on_host=False,
        )

    @property
    def context_parallel(self) -> int:
        return self.gpus // (self.tensor_parallel * self.pipeline_parallel)

    @property
    def stage_layers(self) -> int:
        """Layers of a pipeline stage."""
        return self.model.layers // self.pipeline_parallel

    @property
    def sizes(self) -> tuple[int, int]:
        """P and R of the method."""
        if self.method == "ring":
            return 1, self.context_parallel
        return (self.ulysses or self.context_parallel // self.ring), self.ring

    @property
    def local_tokens(self) -> int:
        """s."""
        return self.tokens // self.context_parallel

    @property
    def schedule(self) -> HeadSchedule:
        tp, model = self.tensor_parallel, self.model
        return head_schedule(model.heads // tp, model.kv_heads // tp, self.sizes[0], self._heads_per_stage)

    @property
    def _heads_per_stage(self) -> int | None:
        return {"upipe": self.heads_per_stage, AUTHORS: None}.get(self.method, self.model.heads // self.tensor_parallel)

    @property
    def ranks_of_node(self) -> int:
        return min(self.gpus, self.gpus_per_node)

    @property
    def layers_kept(self) -> int:
        """Of the model's layers, how many keep their attention."""
        return self.model.layers if self.keep_attention is None else self.keep_attention

    def kept(self, layers: int) -> int | None:
        """Of ``layers`` layers, how many keep their attention: the same share as of the model's."""
        if self.keep_attention is None:
            return None
        return round(self.keep_attention * layers / self.model.layers)

    @property
    def states(self) -> States:
        return states(
            self.model,
            self.sharding,
            shards=self.context_parallel,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            optimizer_on_host=self.optimizer_on_host,
            checkpoint_every=self.checkpoint_every,
            input_bytes=2 * self.local_tokens // self.tensor_parallel * self.model.hidden,
        )

    def check_ranks(self) -> None:
        """All of ``check`` but what depends on P and R."""
        if self.method not in METHODS:
            raise UPipeError(f"--method {self.method} does not exist; choose {', '.join(METHODS)}")
        if self.sharding not in SHARDINGS:
            raise UPipeError(f"--sharding {self.sharding} does not exist; choose {', '.join(SHARDINGS)}")
        for flag, value in (
            ("--gpus", self.gpus),
            ("--tokens", self.tokens),
            ("--gpus-per-node", self.gpus_per_node),
            ("--tp", self.tensor_parallel),
            ("--pp", self.pipeline_parallel),
            ("--ulysses", self.ulysses),
            ("--ring", self.ring),
            ("--checkpoint-every", self.checkpoint_every),
            ("--mlp-tile-tokens", self.mlp_tile_tokens),
            ("--loss-tile-tokens", self.loss_tile_tokens),
        ):
            check_least(flag, value, 1)
        ranks, model = self.tensor_parallel * self.pipeline_parallel, self.model
        if self.method == AUTHORS and (ranks > 1 or model.qk_norm or model.experts):
            raise UPipeError(
                f"--method {AUTHORS} has no tensor or pipeline parallelism, QK norm or experts, as the paper's code; "
                "the nearest model for the paper's 32B is qwen3-32b-no-qk-norm"
            )
        if self.method == AUTHORS and self.documents:
            raise UPipeError(f"--method {AUTHORS} takes no packed documents; leave --documents out")
        if self.keep_attention is not None and self.keep_attention > self.model.layers:
            raise UPipeError(
                f"--keep-attention {self.keep_attention} is more than the {self.model.layers} layers; the most is "
                f"{self.model.layers}"
            )
        pp = f" x --pp {self.pipeline_parallel}" if self.pipeline_parallel > 1 else ""
        if self.gpus % ranks:
            raise UPipeError(
                f"--gpus {self.gpus} is not a multiple of --tp {self.tensor_parallel}{pp}; the nearest is "
                f"{max(1, round(self.gpus / ranks)) * ranks}"
            )
        if self.gpus == ranks:
            raise UPipeError(
                f"--gpus {self.gpus} with --tp {self.tensor_parallel}{pp} are one context-parallel rank, where UPipe "
                f"has nothing to do; the least is {2 * ranks}"
            )
        if self.checkpoint_every > self.stage_layers:
            raise UPipeError(
                f"--checkpoint-every {self.checkpoint_every} is more than the {self.stage_layers} layers of a pipeline "
                f"stage; the most is {self.stage_layers}"
            )
        if self.prefetch == "on" and self.offload == "none":
            raise UPipeError("--prefetch on does nothing without --offload host; add that")
        if self.model.layers % self.pipeline_parallel:
            nearest = min(_divisors(self.model.layers), key=lambda pp: abs(pp - self.pipeline_parallel))
            raise UPipeError(
                f"--pp {self.pipeline_parallel} does not divide the {self.model.layers} layers of "
                f"{self.model.name}; the nearest that does is {nearest}"
            )

    def check(self) -> None:
        """Raises UPipeError unless the run is possible, naming the flag and the nearest value that is."""
        self.check_ranks()
        p, r = self.sizes
        if p * r != self.context_parallel:
            divisors = _divisors(self.context_parallel)
            ring = min(divisors, key=lambda d: (abs(d - r), d))
            raise UPipeError(
                f"--ulysses {p} x --ring {r} is not {self.context_parallel} (--gpus over --tp and --pp); the nearest "
                f"is --ulysses {self.context_parallel // ring} --ring {ring}"
            )
        check_parallelism(
            query_heads=self.model.heads,
            kv_heads=self.model.kv_heads,
            tensor_parallel_size=self.tensor_parallel,
            context_parallel_size=self.context_parallel,
            hierarchical_sizes=[p, r],
            heads_per_stage=self._heads_per_stage,
            sequence_length=self.tokens,
            sequence_parallel=self.tensor_parallel > 1,
        )
        unit = 2 * self.context_parallel
        for length in self.documents or ():
            if self.packed_layout == "document" and length % unit:
                raise UPipeError(
                    f"--documents {length} is no multiple of {unit} (2 x P x R), to which this layout pads; the "
                    f"nearest is {max(1, round(length / unit)) * unit}, or use --packed-layout sequence"
                )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def parse_tokens(given: str, flag: str = "--tokens") -> int:
    """``8M`` is 8 * 2^20, ``128K`` 128 * 2^10. Raises UPipeError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", given.strip().upper())
    if found is None:
        raise UPipeError(f"{flag} {given} is not a number of tokens; write 8M, 128K or 131072")
    tokens = round(float(found[1]) * _UNITS[found[2]])
    if tokens < 1:
        raise UPipeError(f"{flag} {given} is too small; the least is 1")
    return tokens


def tokens_text(tokens: int) -> str:
    """The reverse, short."""
    for unit in ("G", "M", "K"):
        if tokens % _UNITS[unit] == 0:
            return f"{tokens // _UNITS[unit]}{unit}"
    return str(tokens)
