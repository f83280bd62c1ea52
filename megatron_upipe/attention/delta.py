"""What backward needs of the attention output: its product with the output's gradient, row by row.

The backward of softmax attention reads out only in delta = sum over d of dout * out, one number for each token and
head (FlashAttention-2, arXiv 2307.08691, section 3.1). So one number travels instead of d, and where the kernel wants
an out it gets the multiple of dout that has this product: never longer than the true one, and 0 where that is 0.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megatron_upipe.context.merge import accumulation_dtype

TILE = 2**22  # elements in accumulation dtype at a time: less than shows in the peak


def deltas(dout: Tensor, out: Tensor) -> Tensor:
    """[s, b, n, d] twice -> [s, b, n, 1] in accumulation dtype, owned by the caller."""
    dtype = accumulation_dtype(dout.dtype)
    found = dout.new_empty(*dout.shape[:-1], 1, dtype=dtype)
    for rows in _tiles(dout, 0):
        product = dout[rows].to(dtype, copy=True).mul_(out[rows])
        torch.sum(product, dim=-1, keepdim=True, out=found[rows])
    return found


def as_elements(delta: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bytes as elements of ``dtype``, to travel with others: [..., 1] -> [..., k]."""
    return delta.view(dtype)


def from_elements(elements: Tensor) -> Tensor:
    """The reverse, of contiguous ``elements``."""
    return elements.view(accumulation_dtype(elements.dtype))


def out_with_delta(dout: Tensor, delta: Tensor) -> Tensor:
    """An out [b, n, L, d] whose products with ``dout`` are ``delta`` [b, n, L, 1], in accumulation dtype."""
    out = torch.empty_like(dout)
    norm = partial(torch.linalg.vector_norm, dim=-1, keepdim=True)
    for rows in _tiles(dout, 2):
        part = dout[:, :, rows].to(delta.dtype, copy=True)
        # squares of small gradients would vanish: each row is scaled by its largest element
        largest = norm(part, ord=torch.inf)
        scale = torch.where(largest > torch.finfo(dout.dtype).tiny, largest, 1.0)
        square = norm(part.div_(scale)).square_()
        out[:, :, rows] = part.mul_(delta[:, :, rows] / scale / torch.where(square > 0, square, 1.0))
    return out


def _tiles(tensor: Tensor, axis: int) -> list[slice]:
    tokens = tensor.shape[axis]
    step = max(1, TILE * tokens // max(1, tensor.numel()))
    return [slice(start, start + step) for start in range(0, tokens, step)]
