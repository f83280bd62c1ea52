"""Stands where Megatron builds its core attention, with the parameter that one may have."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class SinksOnly(torch.nn.Module):
    """Holds ``softmax_offset`` [H], the sinks, as Megatron's core attention does; called, it returns them.

    A parameter with ``--softmax-type learnable``, zeros with off-by-one, None with vanilla. Unlike Megatron's it is
    marked as split over the tensor-parallel group, without which the gradient norm misses the other ranks' heads.
    ``te``: begins as TransformerEngine's does, with zeros in fp32.
    """

    def __init__(self, config: TransformerConfig, *args: Any, pg_collection: Any, te: bool, **kwargs: Any) -> None:
        super().__init__()
        self._group = pg_collection.tp
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        dtype = torch.float32 if te else config.params_dtype
        offset = torch.zeros(config.num_attention_heads // self._group.size(), device=device, dtype=dtype)
        if config.softmax_type == "learnable":
            if config.perform_initialization and not te:
                config.init_method(offset)
            self.softmax_offset = torch.nn.Parameter(offset)
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        else:
            offset = None if config.softmax_type == "vanilla" else offset
            self.register_buffer("softmax_offset", offset, persistent=False)

    def forward(self) -> Tensor | None:
        return self.softmax_offset

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Megatron's keys and shapes."""
        state = self.state_dict(prefix="", keep_vars=True)
        groups = dict(tp_group=self._group, dp_cp_group=metadata["dp_cp_group"])
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)
