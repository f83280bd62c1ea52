"""What the projections read: this rank's tokens, normed on the way if need be, in the precision of the products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

from torch import Tensor

from megatron_upipe.attention.gradients import flat
from megatron_upipe.precision.plain import PLAIN
from megatron_upipe.precision.protocol import Operand, Precision


class AttentionInput:
    """Tokens [s, b, hidden] of one pass; ``backward``: of one that wants the gradient of the weight as well.

    With ``norm`` (row by row, [t, b, hidden] -> the same) every reader norms ``tile`` tokens at a time, so that the
    normed tensor never exists as a whole. A precision that quantises does so once: its operands stay for the pass.
    """

    def __init__(
        self,
        tokens: Tensor,
        precision: Precision = PLAIN,
        norm: Callable[[Tensor], Tensor] | None = None,
        tile: int = 0,
        backward: bool = False,
    ) -> None:
        self.tokens = tokens
        self._precision, self._norm, self._tile, self._backward = precision, norm, tile, backward

    def tiles(self) -> Iterator[tuple[slice, Operand]]:
        """The rows to be projected, piece by piece, and where they belong."""
        return iter(self._kept) if self._precision.quantises else self._made()

    def project(self, weight: Operand, bias: Tensor | None) -> Tensor:
        """[s, b, n] of a weight's n rows; owned by the caller."""
        projected = None
        for rows, x in self.tiles():
            part = self._precision.product(x, weight, bias)
            shape = (-1, *self.tokens.shape[1:-1], part.shape[-1])
            if rows == slice(None):
                return part.view(shape)
            if projected is None:
                projected = part.new_empty(*self.tokens.shape[:-1], part.shape[-1])
            projected[rows] = part.view(shape)
        return projected

    def _made(self) -> Iterator[tuple[slice, Operand]]:
        if self._norm is None:
            yield slice(None), self._operand(self.tokens)
            return
        for start in range(0, self.tokens.shape[0], self._tile):
            rows = slice(start, start + self._tile)
            yield rows, self._operand(self._norm(self.tokens[rows]))

    def _operand(self, tokens: Tensor) -> Operand:
        return self._precision.tokens(flat(tokens), forward=True, backward=self._backward)

    @cached_property
    def _kept(self) -> list[tuple[slice, Operand]]:
        return list(self._made())
