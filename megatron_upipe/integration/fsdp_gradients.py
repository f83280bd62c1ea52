"""Gradients of Megatron-FSDP, shared out before a layer's backward begins.

Megatron-FSDP keeps a module's whole gradient until the next module's is complete, so that the sum over ranks hides
behind that module's backward. On long sequences this sum takes milliseconds of a layer's seconds, and the memory is
wanted: the output layer's gradient alone is 2 GiB for Llama3-8B. Source: ``GradReducePipeline``,
megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_upipe.layers.mlp_layer import UPipeMLPLayer
from megatron_upipe.layers.transformer_layer import UPipeTransformerLayer
from megatron_upipe.memory.host_need import gradients_wait


def share_gradients_early(model: list[Any]) -> None:
    """For each model chunk under Megatron-FSDP; nothing for others. Not collective."""
    for chunk in model:
        pipelines = [m.grad_reduce_pipeline for m in chunk.modules() if hasattr(m, "grad_reduce_pipeline")]
        for layer in chunk.modules():
            if pipelines and isinstance(layer, (UPipeMLPLayer, UPipeTransformerLayer)):
                size = sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad)
                layer.before_backward = partial(_share, pipelines[0], size)


def _share(pipeline: Any, parameters: int, activation: int) -> None:
    if not gradients_wait(activation, parameters):
        pipeline.wait_for_previous_grad_reduce(0)
