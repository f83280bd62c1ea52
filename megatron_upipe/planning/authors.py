"""Device memory of the paper's own code (togethercomputer/Untied-Ulysses, e465aa8), by the tensors that it holds.

Their block is checkpointed as a whole, its inputs wait in host memory but for the first layer's; the peak is in the
backward of attention, with U = P. Counted from their code, in u1, one [s, b, H*d] tensor, and in tensors of a stage
(U/H of it); what is left is fitted on one published peak: Llama3-8B, 3M tokens, 8 GPUs, 51.1 GiB.
"""

from __future__ import annotations

from megatron_upipe.planning.scenario import Scenario

HEADS, HIDDEN = ("out", "dout"), ("x", "dx")
"""Of H*d and of hidden numbers a token, alive in the backward of every stage."""
STAGE = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "dk of the block", "dv of the block")
RING = 15
"""More tensors of a stage with a ring: dq, dk and dv in fp32, those received, K and V received, a block's own three."""
BLOCK = ("input of the first layer", "hidden state", "its gradient", "block input")
STATE_BYTES = 16  # a parameter: bf16 and fp32 copies, gradient, moments, fully sharded
LAYER_BYTES = 10  # a parameter of a layer: gathered with the next one's in bf16, its gradient, that in fp32 for the sum
FITTED = 5.2  # bytes for each parameter of a vocabulary matrix: gathered, its gradient, loss tiles


def authors_bytes(scenario: Scenario) -> dict[str, float]:
    """Bytes of a rank by kind; ``scenario`` gives model, tokens, P and R (U = P whatever it says)."""
    model, (p, r) = scenario.model, scenario.sizes
    tokens = scenario.local_tokens
    heads, hidden = 2 * tokens * model.heads * model.head_dim, 2 * tokens * model.hidden
    stage = heads * p / model.heads
    return {
        "states": STATE_BYTES * model.parameters / scenario.gpus,
        "attention, full size": heads * len(HEADS) + hidden * len(HIDDEN),
        "attention, of a stage": stage * (len(STAGE) + (RING if r > 1 else 0)),
        "rest of the block": hidden * len(BLOCK),
        "gathered layers": LAYER_BYTES * model.layer_parameters,
        "vocabulary": FITTED * model.vocabulary * model.hidden,
    }


def authors_sent(scenario: Scenario) -> dict[str, float]:
    """Bytes that a rank sends in a step: 8 + 8/g u1 exchanged a layer, since q, k and v are exchanged three times."""
    model, (p, _) = scenario.model, scenario.sizes
    u1 = 2 * scenario.local_tokens * model.heads * model.head_dim
    return {"exchange": model.layers * (8 + 8 * model.kv_heads / model.heads) * u1} if p > 1 else {}
