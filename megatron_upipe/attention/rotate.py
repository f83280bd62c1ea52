"""RoPE from where a projection left queries to where the exchange wants them, and back, in one pass over the memory.

Megatron rotates half of each head against the other; so do a Triton kernel and its twin in torch, to the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import product

import torch
from torch import Tensor

from megatron_upipe.context.exchange import Part
from megatron_upipe.context.merge import accumulation_dtype


@dataclass(frozen=True)
class Rotation:
    """cos and sin [s, r], r even and at most d: the first r elements of a head are rotated.

    In the tensors' dtype every product is rounded, as Megatron's RoPE does; in fp32 only the sum is, as fused ones do.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, angles: Tensor, scale: float, dtype: torch.dtype) -> Rotation:
        """From Megatron's ``angles`` [s, 1, 1, r], not interleaved."""
        angles = angles.flatten(1)
        return cls((torch.cos(angles) * scale).to(dtype), (torch.sin(angles) * scale).to(dtype))


@dataclass(frozen=True)
class Rotated(Part):
    """Queries [s, b, P*n, d] that are rotated when they are packed."""

    tensor: Tensor
    rotation: Rotation

    def write(self, target: Tensor) -> None:
        p = target.shape[0]
        rotate(self.tensor.unflatten(2, (p, -1)), target.permute(1, 2, 0, 3, 4), self.rotation)


def rotate(source: Tensor, target: Tensor, rotation: Rotation, back: bool = False) -> None:
    """Writes ``source`` [s, b, P, n, d], rotated, to ``target``; ``back``: its gradient's way. Any strides."""
    if serves(source.device, source.dtype, source.shape[-1], rotation.cos.shape[-1]):
        from megatron_upipe.attention.rotate_triton import rotate as by_triton

        by_triton(source, target, rotation.cos, rotation.sin, back)
    else:
        rotate_twin(source, target, rotation, back)


def rotate_twin(source: Tensor, target: Tensor, rotation: Rotation, back: bool = False) -> None:
    """The same in torch."""
    r = rotation.cos.shape[-1]
    cos, sin = (t[:, None, None, None] for t in (rotation.cos, rotation.sin))
    turned = source[..., :r]
    a, b = turned.chunk(2, -1)
    straight = turned * cos
    if back:
        sa, sb = (turned * sin).chunk(2, -1)
        across = torch.cat((sb, -sa), -1)
    else:
        across = torch.cat((-b, a), -1) * sin
    target[..., :r] = straight + across
    target[..., r:] = source[..., r:]


@cache
def serves(device: torch.device, dtype: torch.dtype, head_dim: int, rotated: int) -> bool:
    """Whether the Triton kernel is used: on GPUs, once it has given the twin's bits there."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    from megatron_upipe.attention.rotate_triton import rotate as by_triton

    try:
        angles = torch.linspace(0, 6, 5 * rotated, device=device).view(5, 1, 1, rotated)
        source = torch.linspace(-3, 3, 5 * 6 * head_dim, device=device).to(dtype).view(5, 1, 2, 3, head_dim)
        found, wanted = torch.empty_like(source), torch.empty_like(source)
        for of_angles, back in product({dtype, accumulation_dtype(dtype)}, (False, True)):
            rotation = Rotation.of(angles, 1.0, of_angles)
            by_triton(source, found, rotation.cos, rotation.sin, back)
            rotate_twin(source, wanted, rotation, back)
            if not torch.equal(found, wanted):
                raise RuntimeError("other bits than torch's")
    except Exception as error:  # whatever a compiler may raise: torch serves as well
        print(f"megatron_upipe: RoPE by torch on {device}, the Triton kernel does not serve: {error}", flush=True)
        return False
    return True
