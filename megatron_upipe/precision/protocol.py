"""What a precision must do, and how products read a parameter."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

Operand = Any
"""What a product reads: made and understood by one precision only."""


class Precision(Protocol):
    """Matrix products with a parameter [n, k]: y = x w^T, dx = dy w, dw = dy^T x.

    Tensors are flat: x [t, k], dy [t, n]. What is multiplied several times is made an operand once. Results have the
    dtype of the tensors that the operands came from, are owned by the caller, and never collective. The same input
    gives the same operand bit for bit, so that backward may compute again what forward had.
    """

    quantises: bool
    """Whether operands are new tensors, worth keeping; else they are the inputs themselves."""

    alignment: int
    """Tokens and features of every product are multiples of it."""

    def describe(self) -> str:
        """For the log."""
        ...

    def share(self, parameter: Tensor) -> tuple[Tensor, Any]:
        """The whole parameter made ready: a tensor of its shape to take pieces of, and what all pieces share."""
        ...

    def piece(self, data: Tensor, shared: Any, like: Tensor, backward: bool) -> Operand:
        """A piece [n', k'] of ``share``'s tensor for ``product``, or with ``backward`` for ``input_gradient``."""
        ...

    def tokens(self, x: Tensor, forward: bool, backward: bool) -> Operand:
        """For ``product`` if ``forward``, for ``weight_gradient`` if ``backward``."""
        ...

    def gradient(self, dy: Tensor, forward: bool = True, backward: bool = True) -> Operand:
        """For ``input_gradient`` if ``forward``, for ``weight_gradient`` if ``backward``."""
        ...

    def product(self, x: Operand, w: Operand, bias: Tensor | None = None) -> Tensor:
        """x w^T + bias."""
        ...

    def input_gradient(self, dy: Operand, w: Operand, total: Tensor | None = None) -> Tensor:
        """dy w; with ``total``, added to it in its precision."""
        ...

    def weight_gradient(self, dy: Operand, x: Operand, dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
        """dy^T x in ``dtype``; with ``total`` of that dtype, added to it."""
        ...


class Weight:
    """A parameter [n, k] as products read it, in the life of this object, one pass.

    Made ready as a whole once, and once for each direction where it is read as a whole; pieces each time.
    """

    def __init__(self, parameter: Tensor, precision: Precision) -> None:
        self.parameter, self._precision = parameter, precision

    def rows(self, *parts: Callable[[Tensor], Tensor], backward: bool = False) -> Operand:
        """Its rows in the given parts, one after the other; all of them without parts.

        A part maps the parameter to a view of some of its rows, in any shape. ``backward``: for ``input_gradient``.
        """
        if not parts:
            return self._all_backward if backward else self._all_forward
        pieces = [part(self._whole[0]).reshape(-1, self.parameter.shape[1]) for part in parts]
        return self._piece(pieces[0] if len(pieces) == 1 else torch.cat(pieces), backward)

    def columns(self, part: Callable[[Tensor], Tensor]) -> Operand:
        """Some of its columns, for ``input_gradient``; ``part`` maps the parameter to a view of them."""
        return self._piece(part(self._whole[0]).reshape(self.parameter.shape[0], -1), True)

    def _piece(self, data: Tensor, backward: bool) -> Operand:
        return self._precision.piece(data, self._whole[1], self.parameter, backward)

    @cached_property
    def _all_forward(self) -> Operand:
        return self._piece(self._whole[0], False)

    @cached_property
    def _all_backward(self) -> Operand:
        return self._piece(self._whole[0], True)

    @cached_property
    def _whole(self) -> tuple[Tensor, Any]:
        return self._precision.share(self.parameter)
