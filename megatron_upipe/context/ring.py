"""Ring attention over the R ranks of the ring group.

In step i each ring rank attends the keys and values (never expanded to the query heads) of the rank i before it, which
come straight from there, and in backward sends their gradient straight back. A rank is sent only the rows that it sees
any of, and nothing where it sees none: steps outside a window, documents that it has no part of. Who sees what is in
``pieces.py``; all ranks know it of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from megatron_upipe.context.blocks import AttentionSum, Blocks, GradientSum, Place, place, room, take
from megatron_upipe.context.merge import MOST_IN_LOW_PRECISION, accumulation_dtype
from megatron_upipe.context.pieces import RingMask, Rows, Step
from megatron_upipe.kernels.protocol import Kernel

_KV_TAG, _GRADIENT_TAG = 0, 1


class Transfer:
    """One batched sending to a ring rank and receiving from another; ``wait`` exactly once.

    Either side may be empty: no tensors, whatever the rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        tag: int,
        sent: Sequence[Tensor],
        to: int,
        received: Sequence[Tensor],
        source: int,
    ) -> None:
        if not all(t.is_contiguous() for t in (*sent, *received)):
            raise ValueError("a tensor sent around the ring must be contiguous")
        peers = dist.get_process_group_ranks(group)
        self._sent, self._received = sent, received  # alive until they have left and come
        operations = [dist.P2POp(dist.isend, tensor, peers[to], group, tag + i) for i, tensor in enumerate(sent)]
        operations += [
            dist.P2POp(dist.irecv, tensor, peers[source], group, tag + i) for i, tensor in enumerate(received)
        ]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Sequence[Tensor]:
        """What came, owned by the caller."""
        if self._works is None:
            raise RuntimeError("wait called twice on the same ring transfer")
        for work in self._works:
            work.wait()
        self._works, self._sent = None, ()
        return self._received


class _Ring:
    """This rank's place in the ring, and what moves in each step."""

    def __init__(self, mask: RingMask, group: dist.ProcessGroup | None) -> None:
        self._mask, self._group = mask, group
        self.size = 1 if group is None else group.size()
        self._rank = 0 if group is None else group.rank()

    def step(self, i: int) -> Step | None:
        """What this rank does in step i, with keys of the rank i before it."""
        before, _ = self._peers(i)
        return self._mask.step(self._rank, before)

    def _mirrored(self, i: int) -> Step | None:
        """What the rank i behind this one does in step i, with keys of this one."""
        _, behind = self._peers(i)
        return self._mask.step(behind, self._rank)

    def _peers(self, i: int) -> tuple[int, int]:
        """The ranks i before and behind this one."""
        return (self._rank - i) % self.size, (self._rank + i) % self.size

    def place(self, step: Step, like: Tensor) -> Place:
        """The rows that are seen in a step."""
        key = ("seen", id(step), like.device)  # steps are remembered, too
        return self._mask.segments.remembered(key, lambda: place(step.seen, like.device))

    def seen(self, step: Step, kv: Tensor) -> Tensor:
        """Of what a step has fetched, the rows that are seen."""
        return take(kv, self.place(step, kv)) if step.sent_whole else kv

    def fetch(self, kv: Tensor, i: int) -> Transfer | None:
        """Brings the keys and values of step i, from ``kv`` of their owners; None after the last step."""
        if i == self.size:
            return None
        mine, theirs = self.step(i), self._mirrored(i)
        sent = [] if theirs is None else [kv if theirs.sent_whole else take(kv, self.place(theirs, kv)).contiguous()]
        whole = (Rows(0, kv.shape[2]),)
        received = [] if mine is None else [room(kv, whole if mine.sent_whole else mine.seen)]
        before, behind = self._peers(i)
        return Transfer(self._group, _KV_TAG, sent, behind, received, before)

    def bring_back(self, gradients: Sequence[Tensor], totals: Sequence[GradientSum], i: int) -> Callable[[], None]:
        """Sends dk and dv of step i to their owner; the returned call adds those of this rank's to ``totals``."""
        theirs = self._mirrored(i)
        received = [] if theirs is None else [total.room(theirs.seen) for total in totals]
        before, behind = self._peers(i)
        sent = [gradient.contiguous() for gradient in gradients]
        transfer = Transfer(self._group, _GRADIENT_TAG, sent, before, received, behind)

        def add() -> None:
            for total, part in zip(totals, transfer.wait(), strict=False):
                total.add(self.place(theirs, part), part)

        return add


def ring_forward(
    kernel: Kernel, q: Tensor, kv: Tensor, mask: RingMask, scale: float, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Attention of ``q`` [b, m, L, d] to the keys and values of all ring ranks. Collective over the ring.

    ``kv`` [b, 2c, L, d], keys before values, contiguous. Returns out (dtype of q) and lse (accumulation dtype, natural
    log) [b, m, L], owned by the caller; rows that see no key have out 0 and lse -inf.
    """
    ring, blocks, total = _Ring(mask, group), Blocks(kernel, mask, scale), AttentionSum(q)
    own = kv
    for i in range(ring.size):
        transfer = ring.fetch(own, i + 1)
        step = ring.step(i)
        if step is not None:
            blocks.forward(step, q, ring.seen(step, kv), total)
        if transfer is not None:
            (kv,) = transfer.wait() or (None,)
    return total.result()


def ring_backward(
    kernel: Kernel,
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: RingMask,
    scale: float,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Callable[[], tuple[Tensor, Tensor]]]:
    """Gradients of ``ring_forward``, given its out and lse. Collective over the ring.

    Returns dq [b, m, L, d], and what waits for dk and dv [b, c, L, d] of this rank's keys and values, to be called
    once; the caller owns all. They are in accumulation dtype where R is above 8, with a window above 2; else as the
    kernel returns them.
    """
    ring, blocks = _Ring(mask, group), Blocks(kernel, mask, scale)
    # if the additions are few, in the precision of what is added
    few = ring.size * mask.additions <= MOST_IN_LOW_PRECISION
    dtype = q.dtype if few else accumulation_dtype(q.dtype)
    own, (k, v) = kv, kv.chunk(2, dim=1)
    dq, dk, dv = (GradientSum(t, dtype) for t in (q, k, v))
    add_what_comes: Callable[[], None] = lambda: None  # noqa: E731
    for i in range(ring.size):
        transfer = ring.fetch(own, i + 1)
        step = ring.step(i)
        parts: Sequence[GradientSum] = (dk, dv) if i == 0 else ()
        if step is not None:
            kv = ring.seen(step, kv)
            if i > 0:
                parts = [GradientSum(t, dtype) for t in kv.chunk(2, dim=1)]
            blocks.backward(step, (dout, q, out, lse), kv, (dq, *parts))
        if i > 0:
            add_what_comes()
            add_what_comes = ring.bring_back([part.result() for part in parts], (dk, dv), i)
        del parts
        if transfer is not None:
            (kv,) = transfer.wait() or (None,)

    def rest() -> tuple[Tensor, Tensor]:
        add_what_comes()
        return dk.result(), dv.result()

    return dq.result(), rest
