"""Bytes of parameters, gradients and optimizer states on a rank, by how they are sharded. Free of torch.

Megatron's mixed-precision training: bf16 parameters, gradients summed in fp32, fp32 copies of the parameters and two
moments of Adam. Megatron-FSDP gathers a layer's parameters while it runs, with the next one's on their way, and has a
whole layer's gradient before it is shared out.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_upipe.planning.models import ModelShape

PARAMETER, GRADIENT, OPTIMIZER = 2, 4, 12  # bytes each
GIB = 2**30
SHARDINGS = ("ddp", "distributed-optimizer", "megatron-fsdp")
GATHERED_UNITS = 2  # parameters of the layer that runs, and of the next


@dataclass(frozen=True)
class States:
    """Bytes on a rank, by kind. ``host``: optimizer on the host. FSDP's buffers of whole units are those of a layer,
    with the next one's parameters (``unsharded_layer``), or those of the embedding or output layer
    (``unsharded_vocabulary``), never both."""

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
) -> States:
    """On a rank of the first or last pipeline stage; ``shards`` = data x context parallel ranks."""
    vocabulary = model.vocabulary * model.hidden
    tables = vocabulary * (1 if model.tied or pipeline_parallel > 1 else 2)
    here = (model.layers // pipeline_parallel * model.layer_parameters + model.hidden + tables) // tensor_parallel
    parameters = gradients = here
    layer = table = 0
    if sharding == "megatron-fsdp":
        layer = model.layer_parameters // tensor_parallel * (GATHERED_UNITS * PARAMETER + GRADIENT)
        table = vocabulary // tensor_parallel * (PARAMETER + GRADIENT)
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
