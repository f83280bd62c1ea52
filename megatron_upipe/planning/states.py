"""Bytes of parameters, gradients and optimizer states on a rank, by how they are sharded. Free of torch.

Megatron's mixed-precision training: bf16 parameters, gradients summed in fp32, fp32 copies of the parameters and two
moments of Adam. Megatron-FSDP's buffers of whole modules, with ``--suggested-communication-unit-size 1`` (no prefetch,
one reduction in flight), from its ``param_and_grad_buffer.py``: a layer's parameters are gathered while it runs, those
of embedding and output layer stay gathered; a whole module's gradient waits until the next module's is complete, unless
UPipe's layers see to it earlier (``integration/fsdp_gradients.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_upipe.memory.host_need import gradients_wait
from megatron_upipe.planning.models import ModelShape

PARAMETER, GRADIENT, OPTIMIZER = 2, 4, 12  # bytes each
GIB = 2**30
SHARDINGS = ("ddp", "distributed-optimizer", "megatron-fsdp")
AGAIN = 2  # layers gathered while one of them runs forward again for the other


def gib(size: float) -> float:
    """Bytes in GiB, as they are shown."""
    return round(size / GIB, 3)


@dataclass(frozen=True)
class States:
    """Bytes on a rank, by kind. ``host``: optimizer on the host. FSDP's buffers of whole modules are the most that they
    are while layers run (``unsharded_layer``), or while the embedding or the output layer does
    (``unsharded_vocabulary``)."""

    parameters: int
    gradients: int
    optimizer: int
    unsharded_layer: int
    unsharded_vocabulary: int
    host: int

    @property
    def sharded(self) -> int:
        """All but the buffers of whole units."""
        return self.parameters + self.gradients + self.optimizer


def states(
    model: ModelShape,
    sharding: str,
    *,
    shards: int,
    tensor_parallel: int,
    optimizer_on_host: bool,
    pipeline_parallel: int = 1,
    checkpoint_every: int = 1,
    input_bytes: int = 0,
) -> States:
    """On a rank of the first or last pipeline stage; ``shards`` = data x context parallel ranks, ``input_bytes`` of
    a layer's input."""
    vocabulary = model.vocabulary * model.hidden
    tables = vocabulary * (1 if model.tied or pipeline_parallel > 1 else 2)
    here = (model.layers // pipeline_parallel * model.layer_parameters + model.hidden + tables) // tensor_parallel
    parameters = gradients = here
    layer = table = 0
    if sharding == "megatron-fsdp":
        one, matrix, gathered = (n // tensor_parallel for n in (model.layer_parameters, vocabulary, tables))
        running = 1 if checkpoint_every == 1 else AGAIN
        # where time counts, the gradient of the output layer, or of the layer before, is still being shared out
        before = max(one, matrix) if gradients_wait(input_bytes, one) else 0
        layer = (gathered + running * one) * PARAMETER + (one + before) * GRADIENT
        # UPipe's loss has summed the gradient in fp32 when its 16-bit copy is made, and has given that to FSDP's fp32
        table = gathered * PARAMETER + matrix * (PARAMETER + GRADIENT)
        parameters = gradients = here // shards
    optimizer = (here if sharding == "ddp" else here // shards) * OPTIMIZER
    return States(
        parameters=parameters * PARAMETER,
        gradients=gradients * GRADIENT,
        optimizer=0 if optimizer_on_host else optimizer,
        unsharded_layer=layer,
        unsharded_vocabulary=table,
        host=optimizer if optimizer_on_host else 0,
    )
