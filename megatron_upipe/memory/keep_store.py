"""The keep store: a layer's attention output and lse between forward and backward."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class KeptAttention(NamedTuple):
    """On the device, owned by the autograd node that made it."""

    out: Tensor
    """[s, b, H*d], Megatron's head order, what the output projection takes."""
    lse: tuple[Tensor, ...]
    """For each stage [b, m, L], of the heads that this rank computed."""
