"""What the projections read: this rank's tokens, normed on the way if need be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_upipe.attention.gradients import flat, transposed_product
from megatron_upipe.context.merge import accumulation_dtype


@dataclass(frozen=True)
class AttentionInput:
    """Tokens [s, b, hidden].

    With ``norm`` (row by row, [t, b, hidden] -> the same) every reader norms ``tile`` tokens at a time, so that the
    normed tensor never exists as a whole.
    """

    tokens: Tensor
    norm: Callable[[Tensor], Tensor] | None = None
    tile: int = 0

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """The rows to be projected, piece by piece, and where they belong."""
        if self.norm is None:
            yield slice(None), self.tokens
            return
        for start in range(0, self.tokens.shape[0], self.tile):
            rows = slice(start, start + self.tile)
            yield rows, self.norm(self.tokens[rows])

    def project(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[s, b, n] of ``weight`` [n, hidden]; owned by the caller."""
        if self.norm is None:
            return F.linear(self.tokens, weight, bias)
        projected = self.tokens.new_empty(*self.tokens.shape[:2], weight.shape[0])
        for rows, normed in self.tiles():
            projected[rows] = F.linear(normed, weight, bias)
        return projected

    def transposed_product(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Gradient of the weight of ``project``, [n, hidden], from that of its result [s, b, n]; summed in fp32."""
        if self.norm is None:
            return transposed_product(flat(gradient), flat(self.tokens), dtype)
        total = None
        for rows, normed in self.tiles():
            part = transposed_product(flat(gradient[rows]), flat(normed), accumulation_dtype(gradient.dtype))
            total = part if total is None else total.add_(part)
        return total
