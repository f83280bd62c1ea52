"""The lse merge: exact, and finite where rows have no keys."""

import torch

from megatron_upipe.context.merge import merge_
from megatron_upipe.kernels.reference import ReferenceKernel


def test_two_blocks_merge_to_the_whole():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 4, dtype=torch.float64) for n in (5, 11, 11))
    kernel = ReferenceKernel()
    out, lse = kernel.forward(q, k[:, :, :4], v[:, :, :4], False, 0.7)
    merge_(out, lse, *kernel.forward(q, k[:, :, 4:], v[:, :, 4:], False, 0.7))
    whole, whole_lse = kernel.forward(q, k, v, False, 0.7)
    torch.testing.assert_close(out, whole, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-13, atol=1e-13)


def test_rows_without_keys_stay_finite():
    inf = torch.inf
    lse = torch.tensor([[[-inf, -inf, 0.5, 2.0]]])
    out = torch.tensor([[[[0.0], [0.0], [3.0], [1.0]]]])
    block_lse = torch.tensor([[[-inf, 1.5, -inf, 2.0]]])
    block_out = torch.tensor([[[[0.0], [7.0], [0.0], [5.0]]]])
    merge_(out, lse, block_out, block_lse)
    assert torch.equal(out, torch.tensor([[[[0.0], [7.0], [3.0], [3.0]]]]))
    torch.testing.assert_close(lse, torch.tensor([[[-inf, 1.5, 0.5, 2.0 + torch.log(torch.tensor(2.0))]]]))
