"""When a layer's backward waits for the gradients before it: only where its input outweighs them."""

import pytest
import torch

from megatron_upipe.integration.fsdp_gradients import share_gradients_early
from megatron_upipe.layers.transformer_layer import UPipeTransformerLayer


class Pipeline:
    def __init__(self):
        self.waits = []

    def wait_for_previous_grad_reduce(self, remaining):
        self.waits.append(remaining)


def chunk(pipeline):
    layer = UPipeTransformerLayer.__new__(UPipeTransformerLayer)
    torch.nn.Module.__init__(layer)
    layer.before_backward = lambda size: None
    layer.weight = torch.nn.Parameter(torch.empty(10))
    layer.frozen = torch.nn.Parameter(torch.empty(1000), requires_grad=False)
    whole = torch.nn.Sequential(layer)
    if pipeline is not None:
        whole.grad_reduce_pipeline = pipeline
    return whole, layer


@pytest.mark.parametrize(("size", "waits"), [(39, []), (40, [0])])
def test_waits_on_long_sequences(size, waits):
    pipeline = Pipeline()
    whole, layer = chunk(pipeline)
    share_gradients_early([whole])
    layer.before_backward(size)
    assert pipeline.waits == waits


def test_without_fsdp_nothing_waits():
    whole, layer = chunk(None)
    before = layer.before_backward
    share_gradients_early([whole])
    assert layer.before_backward is before
