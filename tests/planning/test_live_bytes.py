"""The byte counter: peaks, frees, views, backward."""

import torch

from megatron_upipe.planning.live_bytes import LiveBytes

MIB = 2**20


def mib(n):
    return torch.zeros(n * MIB // 4)


def test_counts_peak_and_frees():
    with LiveBytes() as live:
        a = mib(3)
        b = mib(2)
        assert live.now == 5 * MIB
        del a
        assert live.now == 2 * MIB
        c = b.view(2, -1)[0]
        assert live.now == 2 * MIB
        del b, c
        mib(4)
    assert live.now == 0 and live.peak == 5 * MIB


def test_leaves_out_what_existed_before():
    before = mib(2)
    with LiveBytes() as live:
        view = before.view(4, -1)[1:]
        copy = view.clone()
        assert live.now == copy.nbytes
        before.add_(1)
        assert live.peak == copy.nbytes


def test_sees_what_backward_holds():
    x = mib(1).requires_grad_()
    with LiveBytes() as live:
        live.count(x)
        y = x.exp()
        z = y.exp()  # both results are saved for backward
        del y
        assert live.now == 3 * MIB
        z.sum().backward()
        del z
    assert live.now == 2 * MIB, "x and its gradient"
    assert live.peak >= 4 * MIB
