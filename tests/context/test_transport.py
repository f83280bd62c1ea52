"""fast-ulysses as a transport, on a stand-in with its recorded signature; and when it is passed over."""

import sys
import types

import pytest
import torch
import torch.distributed as dist

from megatron_upipe.context import fast_ulysses
from megatron_upipe.context.exchange import start_to_heads, start_to_sequence
from megatron_upipe.context.transport import TorchTransport
from megatron_upipe.errors import UPipeError

CUDA = torch.device("cuda", 0)


class UlyssesGroup:
    """Of fast-ulysses 0.2.1: scatters heads and gathers tokens of [b, s, P*n, d], rank by rank."""

    def __init__(self, process_group=None, device=None, *, require_nvlink=True):
        self._group = process_group

    def all_to_all_4d_async(self, x, *, mode=0, out=None, seq_splits=None, head_splits=None, lend=False):
        b, s, heads, d = x.shape
        p = self._group.size()
        assert mode == 0 and x.is_contiguous() and d * x.itemsize % 16 == 0, "what its documentation asks for"
        send = x.view(b, s, p, heads // p, d).permute(2, 0, 1, 3, 4).contiguous()
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send, group=self._group)
        return types.SimpleNamespace(wait=lambda: received.permute(1, 0, 2, 3, 4).reshape(b, p * s, heads // p, d))


def _same_as_torch(rank, dtype, head_dim):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fast_ulysses", types.SimpleNamespace(UlyssesGroup=UlyssesGroup))
        engines = fast_ulysses.FastUlysses(dist.group.WORLD, torch.device("cpu"))
    p = dist.get_world_size()
    torch.manual_seed(rank)
    q, kv = (torch.randn(6, 1, p * n, head_dim).to(dtype) for n in (1, 3))
    there = [start_to_heads([q, kv], t)() for t in (engines, TorchTransport(dist.group.WORLD))]
    back = [start_to_sequence(list(parts), t)() for parts, t in zip(there, (engines, engines), strict=True)]
    return all(torch.equal(a, b) for found in (there, back) for a, b in zip(*found, strict=True)) and torch.equal(
        back[0][1].flatten(2, 3), kv
    )


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 8), (torch.bfloat16, 5)])
def test_copy_engines_bring_the_same_bits(workers, dtype, head_dim):
    assert all(workers.run(2, _same_as_torch, dtype, head_dim))


@pytest.mark.parametrize(
    ("size", "device", "dtype", "reason"),
    [
        (2, torch.device("cpu"), torch.bfloat16, "needs GPUs"),
        (16, CUDA, torch.bfloat16, "up to 8 ranks, not 16"),
        (8, CUDA, torch.float64, "does not move torch.float64"),
        (8, CUDA, torch.bfloat16, "not installed"),
    ],
)
def test_refuses(size, device, dtype, reason, monkeypatch):
    monkeypatch.setattr(fast_ulysses, "find_spec", lambda name: None)
    assert reason in fast_ulysses.refuses(size, device, dtype)


def test_serves_where_it_can(monkeypatch):
    monkeypatch.setattr(fast_ulysses, "find_spec", lambda name: object())
    assert fast_ulysses.refuses(8, CUDA, torch.bfloat16) is None


class Wrong(TorchTransport):
    def __init__(self, group, device=None):
        super().__init__(group)

    def start(self, send):
        return super().start(send + 1)


def _chosen(rank):
    group, cpu = dist.group.WORLD, torch.device("cpu")
    with pytest.raises(UPipeError, match="--upipe-exchange fast-ulysses: it needs GPUs, not cpu; use nccl"):
        fast_ulysses.copy_engines("fast-ulysses", group, cpu, torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_ulysses, "refuses", lambda *inputs: None)
        patch.setattr(fast_ulysses, "_decided", {})
        made = []
        patch.setattr(fast_ulysses, "FastUlysses", lambda group, device: made.append(1) or TorchTransport(group))
        for _ in range(2):
            assert isinstance(fast_ulysses.copy_engines("auto", group, cpu, torch.bfloat16), TorchTransport)
        assert len(made) == 1, "one for all layers"

        def refused(kind, reason):
            patch.setattr(fast_ulysses, "_decided", {})
            if rank == 1:  # what one rank lacks, all do without
                patch.setattr(fast_ulysses, "FastUlysses", kind)
            assert fast_ulysses.copy_engines("auto", group, cpu, torch.bfloat16) is None
            with pytest.raises(UPipeError, match=f"{reason}; use nccl"):
                fast_ulysses.copy_engines("fast-ulysses", group, cpu, torch.bfloat16)

        def no_nvlink(group, device):
            raise RuntimeError("GPUs 0 and 1 are not joined by NVLink")

        refused(no_nvlink, "not joined by NVLink")
        patch.setattr(fast_ulysses, "FastUlysses", lambda group, device: Wrong(group))
        refused(Wrong, "it brings other bytes than torch.distributed")
        patch.setattr(fast_ulysses, "FastUlysses", lambda group, device: TorchTransport(group))
        patch.setattr(fast_ulysses.socket, "gethostname", lambda: f"node{rank}")
        refused(lambda group, device: TorchTransport(group), "it serves one node, and the Ulysses group is on 2")
    assert fast_ulysses.copy_engines("nccl", group, cpu, torch.bfloat16) is None
    return fast_ulysses.copy_engines("auto", group, cpu, torch.bfloat16) is None


def test_auto_goes_without(workers):
    assert workers.run(2, _chosen) == [True, True]
