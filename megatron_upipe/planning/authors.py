"""Device memory of the paper's own code (togethercomputer/Untied-Ulysses, e465aa8), by the tensors that it holds.

Their block is checkpointed as a whole, its inputs wait in host memory but for the first layer's; the peak is in the
backward of attention, with U = P. Counted from their code, in u1, one [s, b, H*d] tensor, and in tensors of a stage
(U/H of it); what is left is fitted on one published peak: Llama3-8B, 3M tokens, 8 GPUs, 51.1 GiB.
"""

from __future__ import annotations

from megatron_upipe.planning.scenario import Scenario
from megatron_upipe.planning.work import Work

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


def authors_work(scenario: Scenario) -> Work:
    """8 + 8/g u1 exchanged a layer, since q, k and v are exchanged three times; the block runs forward twice, q, k and
    v three times, the MLP three times, too (their tiles recompute)."""
    model, (p, _), tokens = scenario.model, scenario.sizes, scenario.local_tokens
    u1 = 2 * tokens * model.heads * model.head_dim
    attention = model.layers * 2 * tokens * scenario.tokens * model.heads * model.head_dim / 2  # one product
    matrices = 2 * tokens * model.layers * model.layer_parameters
    input_bytes = 2 * tokens * model.hidden * (model.layers - 1)
    return Work(
        gemm_flops=5 * matrices + 4 * 2 * tokens * model.vocabulary * model.hidden,
        attention_forward_flops=2 * 2 * attention,
        attention_backward_flops=5 * attention,
        sent={"exchange": model.layers * (8 + 8 * model.kv_heads / model.heads) * u1 * (p - 1) / p} if p > 1 else {},
        copied={"to host": input_bytes, "to device": input_bytes},
        collectives={"exchange": 40 * model.layers} if p > 1 else {},
        attention_forward_runs=2.0,
    )
