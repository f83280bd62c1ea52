"""Output layer and cross entropy, tile by tile: the logits of a tile of tokens are all that ever exist of them.

Forward keeps the log-sum-exp of every token; backward makes each tile's logits again. The gradient of a token's loss is
known in backward only, since Megatron masks and weighs losses outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_upipe.attention.gradients import WeightGradient
from megatron_upipe.attention.kept import gather_rows
from megatron_upipe.context.merge import accumulation_dtype
from megatron_upipe.layers.tiles import Tiles
from megatron_upipe.precision.plain import PLAIN


@dataclass(frozen=True)
class LossCall:
    """One call. ``logits`` is Megatron's output layer, [t/TP or t, b, hidden] -> [t, b, V/TP], and ``weight`` its
    weight [V/TP, hidden], to be asked for after a call of it. ``reduce_input`` sums a
    gradient of its input over the tensor-parallel group, and shards it again under sequence parallelism; ``gather`` as
    in ``AttentionCall``. ``first`` is this rank's first vocabulary entry, ``scale`` what logits are multiplied by.
    """

    tiles: Tiles
    logits: Callable[[Tensor], Tensor]
    weight: Callable[[], Tensor]
    gather: Callable[[Tensor], Tensor]
    reduce_input: Callable[[Tensor], Tensor]
    group: dist.ProcessGroup | None
    first: int
    scale: float
    fuse: bool

    def tiled(
        self, hidden: Tensor, labels: Tensor
    ) -> Iterator[tuple[slice, tuple[slice, ...], Tensor, Tensor, Tensor]]:
        """For each tile its rows of ``hidden`` and among all tokens, its logits in accumulation dtype, the position of
        its labels in them, and whether these are this rank's. Collective over tensor parallelism."""
        for rows, pieces in zip(self.tiles.rows(), self.tiles.gathered(), strict=True):
            logits = self.logits(hidden[rows])
            logits = logits.to(accumulation_dtype(logits.dtype), copy=True)
            if self.scale != 1:
                logits.mul_(self.scale)
            position = gather_rows(labels, pieces) - self.first
            mine = (position >= 0) & (position < logits.shape[-1])
            yield rows, pieces, logits, position.clamp(0, logits.shape[-1] - 1).unsqueeze(-1), mine
            del logits


class TiledLossFunction(torch.autograd.Function):
    """``apply(grad_enabled, call, hidden, labels, weight)`` -> losses.

    ``hidden`` [s/TP or s, b, hidden], ``labels`` [s, b]; losses [s, b] in fp32 (fp64 for fp64). A label outside of the
    vocabulary counts as Megatron's cross entropy has it: its logit is the largest one, and does not get a gradient.
    Collective over tensor parallelism.
    """

    @staticmethod
    def forward(ctx: Any, grad_enabled: bool, call: LossCall, hidden: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        dtype = accumulation_dtype(hidden.dtype)
        losses = torch.empty(labels.shape, dtype=dtype, device=hidden.device)
        lse = torch.empty_like(losses)
        for _, pieces, logits, position, mine in call.tiled(hidden, labels):
            most = logits.amax(-1, keepdim=True)
            if call.group is not None:
                dist.all_reduce(most, dist.ReduceOp.MAX, group=call.group)
            logits.sub_(most)
            target = logits.gather(-1, position).squeeze(-1).masked_fill_(~mine, 0)
            sums = torch.stack((target, logits.exp_().sum(-1)))
            if call.group is not None:
                dist.all_reduce(sums, group=call.group)
            logs = sums[1].log_()
            _scatter_rows(losses, pieces, logs - sums[0])
            _scatter_rows(lse, pieces, logs + most.squeeze(-1))
            del logits
        if grad_enabled:
            ctx.call = call
            ctx.save_for_backward(hidden, labels, lse)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses: Tensor) -> tuple:
        call: LossCall = ctx.call
        hidden, labels, lse = ctx.saved_tensors
        _, _, needs_hidden, _, needs_weight = ctx.needs_input_grad
        dhidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs_hidden else None
        dweight = WeightGradient(call.weight(), call.fuse, summed=True) if needs_weight else None
        for rows, pieces, logits, position, mine in call.tiled(hidden, labels):
            dlogits = logits.sub_(gather_rows(lse, pieces).unsqueeze(-1)).exp_()
            dlogits.scatter_add_(-1, position, -mine.to(dlogits.dtype).unsqueeze(-1))
            dlogits.mul_(gather_rows(dlosses, pieces).unsqueeze(-1).mul(call.scale))
            dlogits = dlogits.to(hidden.dtype)
            del logits
            if dweight is not None:
                dweight.add_product(PLAIN, dlogits.flatten(0, 1), call.gather(hidden[rows]).flatten(0, 1))
            if dhidden is not None:
                dhidden[rows] = call.reduce_input(dlogits @ call.weight())
            del dlogits
        return None, None, dhidden, None, dweight and dweight.result()


def _scatter_rows(target: Tensor, pieces: tuple[slice, ...], values: Tensor) -> None:
    """The opposite of ``gather_rows``."""
    start = 0
    for rows in pieces:
        stop = start + rows.stop - rows.start
        target[rows] = values[start:stop]
        start = stop
