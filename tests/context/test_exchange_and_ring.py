"""Exchange and ring on real process groups: every element in its place, only K and V travel."""

import pytest
import torch
import torch.distributed as dist

from megatron_upipe.context.exchange import start_to_heads, start_to_sequence
from megatron_upipe.context.layout import SequenceLayout
from megatron_upipe.context.pieces import RingMask
from megatron_upipe.context.ring import Transfer, ring_backward, ring_forward
from megatron_upipe.context.segments import one_document, packed_segments
from megatron_upipe.context.transport import TorchTransport
from megatron_upipe.kernels.reference import ReferenceKernel


def encoded(positions, b, heads, d):
    """[s, b, heads, d] whose values say where they come from."""
    index = [torch.tensor(positions), torch.arange(b), torch.arange(heads), torch.arange(d)]
    grids = torch.meshgrid(*index, indexing="ij")
    return (grids[0] * 1000 + grids[1] * 100 + grids[2] * 10 + grids[3]).double()


def _exchange(rank, p, strided):
    layout = SequenceLayout(p, 1)
    length, b, n, d = 2 * p * 3, 2, 2, 5
    positions = [i for half in layout.positions(rank, length) for i in half]
    shard = encoded(positions, b, p * n, d)
    if strided:
        shard = shard.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    transport = TorchTransport(dist.group.WORLD) if p > 1 else None
    (heads,) = start_to_heads([shard], transport)()
    wanted = encoded(list(range(length)), b, p * n, d)[:, :, rank * n : (rank + 1) * n].permute(1, 2, 0, 3)
    assert torch.equal(heads, wanted)
    assert heads.is_contiguous()
    (back,) = start_to_sequence([heads], transport)()
    assert torch.equal(back.flatten(2, 3), shard)
    return True


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_exchange_puts_every_element_in_its_place_and_back(workers, p, strided):
    assert all(workers.run(p, _exchange, p, strided))


def _count_sent(rank, causal):
    """Bytes that a forward and a backward send around the ring."""
    size = dist.get_world_size()
    sent = []
    original = dist.P2POp

    def counting(op, tensor, *args):
        if op is dist.isend:
            sent.append(tensor.nbytes)
        return original(op, tensor, *args)

    dist.P2POp = counting
    try:
        torch.manual_seed(rank)
        q, kv = torch.randn(2, 6, 8, 4).double(), torch.randn(2, 2 * 3, 8, 4).double()
        kernel = ReferenceKernel()
        mask = RingMask(one_document(SequenceLayout(1, size), 8 * size), causal)
        out, lse = ring_forward(kernel, q, kv, mask, 0.5, dist.group.WORLD)
        forward = sum(sent)
        ring_backward(kernel, torch.ones_like(out), q, kv, out, lse, mask, 0.5, dist.group.WORLD)[1]()
    finally:
        dist.P2POp = original
    # gradients of the keys that were seen: under the mask half of them where the owner comes later
    halves = sum(1 if causal and dist.get_rank() > source else 2 for source in range(size) if source != dist.get_rank())
    return forward == (size - 1) * kv.nbytes and sum(sent) - 2 * forward == halves * kv.nbytes // 2


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_ring_sends_kv_heads_only(workers, size, causal):
    """K and V of each rank to every other, once more in backward, and their gradients home."""
    assert all(workers.run(size, _count_sent, causal))


def _sent_rows(rank, window, documents):
    """Rows of keys and values that forward sends, and those of gradients in backward."""
    size, length = dist.get_world_size(), 64
    layout = SequenceLayout(1, size)
    segments = one_document(layout, length)
    if documents is not None:
        segments = packed_segments(layout, length, documents, documents, per_document=False)
    mask, sent = RingMask(segments, True, window), []
    original = dist.P2POp

    def counting(op, tensor, *args):
        if op is dist.isend:
            sent.append(tensor.shape[1] * tensor.shape[2])
        return original(op, tensor, *args)

    q, kv = torch.randn(1, 2, length // size, 4).double(), torch.randn(1, 2, length // size, 4).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "P2POp", counting)
        out, lse = ring_forward(ReferenceKernel(), q, kv, mask, 0.5, dist.group.WORLD)
        forward = sum(sent)
        ring_backward(ReferenceKernel(), out, q, kv, out, lse, mask, 0.5, dist.group.WORLD)[1]()
    return forward // 2, (sum(sent) - 2 * forward) // 2


def test_only_rows_that_are_seen_are_sent(workers):
    """4 ranks with 2 chunks of 8 tokens each."""
    every = [(48, gradients) for gradients in (48, 40, 32, 24)]
    assert workers.run(4, _sent_rows, None, None) == every
    # the front goes on to the next rank and the back to the one before, less the tokens too far back
    assert workers.run(4, _sent_rows, 5, None) == [(5, 5), (10, 10), (10, 10), (5, 5)]
    assert workers.run(4, _sent_rows, 0, None) == [(0, 0)] * 4
    # documents of a chunk each; and two that end in the first chunks, before one over all the others
    assert workers.run(4, _sent_rows, None, list(range(0, 65, 8))) == [(0, 0)] * 4
    assert workers.run(4, _sent_rows, None, [0, 8, 13, 20, 64]) == [(0, 36), (19, 28), (36, 19), (48, 4)]


def _non_causal(rank):
    size = dist.get_world_size()
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, n, 8 * size, 4).double().requires_grad_() for n in (4, 2, 2))
    cotangent = torch.randn(1, 4, 8 * size, 4).double()
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.5, enable_gqa=True)
    wanted.backward(cotangent)
    mine = slice(rank * 8, (rank + 1) * 8)
    kv = torch.cat((k, v), 1)[:, :, mine].detach().contiguous()
    local_q, kernel, group = q[:, :, mine].detach(), ReferenceKernel(), dist.group.WORLD
    mask = RingMask(one_document(SequenceLayout(1, size), 8 * size), causal=False)
    out, lse = ring_forward(kernel, local_q, kv, mask, 0.5, group)
    dq, rest = ring_backward(kernel, cotangent[:, :, mine], local_q, kv, out, lse, mask, 0.5, group)
    dk, dv = rest()
    pairs = [(out, wanted), (dq, q.grad), (dk, k.grad), (dv, v.grad)]
    return max((a - b[:, :, mine]).abs().max().item() for a, b in pairs)


def test_non_causal_ring(workers):
    assert max(workers.run(3, _non_causal)) < 1e-12


def _guards(rank):
    next_rank, previous = (rank + 1) % 3, (rank - 1) % 3
    transfer = Transfer(dist.group.WORLD, 0, [torch.full((2,), float(rank))], next_rank, [torch.empty(2)], previous)
    (received,) = transfer.wait()
    with pytest.raises(RuntimeError, match="wait called twice"):
        transfer.wait()
    with pytest.raises(ValueError, match="must be contiguous"):
        Transfer(dist.group.WORLD, 0, [torch.zeros(4, 4).t()[:, :2]], next_rank, [], previous)
    assert Transfer(dist.group.WORLD, 0, [], next_rank, [], previous).wait() == [], "nothing to do is no error"
    return received[0].item()


def test_transfer_guards(workers):
    assert workers.run(3, _guards) == [2.0, 0.0, 1.0]


def _partner_is_gone(rank):
    from datetime import timedelta

    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)time"):
            Transfer(group, 0, [torch.zeros(2)], 1, [torch.zeros(2)], 1).wait()
    dist.barrier()
    return True


def test_a_missing_partner_ends_in_an_error_not_a_hang(workers):
    assert workers.run(2, _partner_is_gone) == [True, True]
