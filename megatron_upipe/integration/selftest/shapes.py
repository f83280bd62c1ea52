"""Which configurations a selftest tries. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_upipe.attention.schedule import legal_heads_per_stage
from megatron_upipe.errors import UPipeError

# query heads, KV heads, head size
MODELS = {
    "llama3-8b": (32, 8, 128),
    "llama3-70b": (64, 8, 128),
    "qwen3-32b": (64, 8, 128),
    "mixtral-8x7b": (32, 8, 128),
}


@dataclass(frozen=True)
class Trial:
    """One row of the selftest's table; tp * p * r is the world's size."""

    tp: int
    p: int
    r: int
    heads_per_stage: int
    sequence_parallel: bool
    precision: str  # fp64 or bf16
    layer: bool = False  # whole layers with the host store, not the attention alone
    packed: bool = False  # packed documents, with a sliding window and sinks

    def name(self) -> str:
        tp = f"TP {self.tp}{' + SP' if self.sequence_parallel else ''}, " if self.tp > 1 else ""
        what = "layers, host store" if self.layer else "documents, window, sinks" if self.packed else self.precision
        return f"{tp}P {self.p} x R {self.r}, U {self.heads_per_stage}, {what}"


def trials(heads: int, kv_heads: int, world: int) -> list[Trial]:
    """All (TP, P, R) with product ``world`` that fit, each with the least, a middle and the largest U; with the largest
    P also whole layers, and with the largest that leaves a ring packed documents.

    TP is 1 or 2. Raises UPipeError if nothing fits.
    """
    found = []
    for tp in (1, 2):
        if world % tp or heads % tp or kv_heads % tp or world == tp:
            continue
        layer = packed = None
        for p in range(1, world // tp + 1):
            if (world // tp) % p:
                continue
            legal = legal_heads_per_stage(heads // tp, kv_heads // tp, p)
            if not legal:
                continue
            for u in sorted({legal[0], legal[len(legal) // 2], legal[-1]}):
                found.append(Trial(tp, p, world // tp // p, u, tp > 1, "fp64"))
            if tp == 1:
                found.append(Trial(tp, p, world // p, legal[0], False, "bf16"))
            layer = Trial(tp, p, world // tp // p, legal[0], tp > 1, "fp64", layer=True)
            if layer.r > 1 or packed is None:
                packed = replace(layer, layer=False, packed=True)
        if layer is not None:
            found += [layer, packed]
    if not found:
        raise UPipeError(
            f"no UPipe layout fits {heads} query heads and {kv_heads} KV heads on {world} ranks; "
            "try another number of ranks, at least 2"
        )
    return found
