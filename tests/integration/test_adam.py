"""The stand-in's Adam: torch's arithmetic, FusedAdam's bookkeeping."""

import copy

import pytest
import torch

from megatron_upipe.integration.cpu.adam import GroupStepAdam


def make(cls, **kwargs):
    torch.manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(n)) for n in (5, 3, 7)]
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "lr": 3e-3, "weight_decay": 0.0}]
    return params, cls(groups, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, **kwargs)


def train(params, optimizer, steps, seed=4):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize(("adam_w_mode", "torch_class"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_equals_torch(adam_w_mode, torch_class):
    params, optimizer = make(GroupStepAdam, adam_w_mode=adam_w_mode)
    expected, reference = make(torch_class, foreach=False)
    train(params, optimizer, 5)
    train(expected, reference, 5)
    for p, e in zip(params, expected, strict=True):
        assert torch.equal(p, e)


def test_resumes_bit_for_bit():
    straight, optimizer = make(GroupStepAdam)
    train(straight, optimizer, 3)
    resumed, fresh = make(GroupStepAdam)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        for r, s in zip(resumed, straight, strict=True):
            r.copy_(s)
    train(straight, optimizer, 3, seed=5)
    train(resumed, fresh, 3, seed=5)
    assert fresh.param_groups[0]["step"] == 6
    for r, s in zip(resumed, straight, strict=True):
        assert torch.equal(r, s)


def test_group_without_gradients_does_not_count():
    params, optimizer = make(GroupStepAdam)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert [group.get("step") for group in optimizer.param_groups] == [1, None]
