"""A training script that writes down what Megatron-FSDP holds while UPipe's layers run; for test_fsdp_buffers.py."""

import json
import os
from pathlib import Path
from typing import Any

from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as fsdp

from megatron_upipe.integration import gpt_entry
from megatron_upipe.layers.function import LayerCall

pipelines: dict[str, Any] = {}
seen: dict[str, list] = {"finish": [], "second_half_gradient": []}


def remember(name: str) -> None:
    pipeline = getattr(fsdp, name)
    original = pipeline.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        pipelines[name] = self

    pipeline.__init__ = init


def look(name: str) -> None:
    """At each call of a half of a layer: which units' parameters are gathered, how many gradients are on their way."""
    original = getattr(LayerCall, name)

    def half(self: LayerCall, *args: Any) -> Any:
        gather = pipelines["AllGatherPipeline"]
        units = [
            group.fsdp_unit_id
            for bucket, group in enumerate(gather.buffer.parameter_groups)
            if gather.bucket_status[gather.get_bucket_key(bucket, False)] != fsdp.BucketStatus.EMPTY
        ]
        seen[name].append((units, len(pipelines["GradReducePipeline"].grad_reduce_queue)))
        return original(self, *args)

    setattr(LayerCall, name, half)


for pipeline in ("AllGatherPipeline", "GradReducePipeline"):
    remember(pipeline)
for half in seen:
    look(half)
gpt_entry.main()
if os.environ["RANK"] == "0":
    Path(os.environ["FSDP_PROBE"]).write_text(json.dumps(seen), encoding="utf-8")
