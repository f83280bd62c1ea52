"""TransformerEngine's linears, by Megatron's wrappers, whose parameters UPipe multiplies by itself.

To be imported only where TransformerEngine is installed. Their own forward serves one context-parallel rank, where
Megatron's layer runs.
"""

from __future__ import annotations

from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

from megatron_upipe.attention.linears import ReturnsParameters


class UPipeTEColumnParallelLinear(ReturnsParameters, TEColumnParallelLinear):
    """``linear_qkv`` and ``linear_fc1``."""


class UPipeTERowParallelLinear(ReturnsParameters, TERowParallelLinear):
    """``linear_proj`` and ``linear_fc2``."""
