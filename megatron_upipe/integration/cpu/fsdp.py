"""Megatron-FSDP on a CPU: its device strings ``cuda:<current device>`` and CUDA device meshes become the CPU's."""

from typing import Any

import torch
from torch.distributed import DeviceMesh

from megatron_upipe.integration.cpu.tensors import names_cuda
from megatron_upipe.integration.symbols import Replacement

_FSDP = "megatron.core.distributed.fsdp"


class TorchWithCpuDevices:
    """torch, except that every CUDA device is the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(device: Any, *args: Any) -> torch.device:
        return torch.device("cpu") if names_cuda(device) else torch.device(device, *args)


class CpuDeviceMesh:
    """``DeviceMesh.from_group`` on the CPU, whatever device type is asked for."""

    @staticmethod
    def from_group(*args: Any, **kwargs: Any) -> DeviceMesh:
        return DeviceMesh.from_group(*args, **{**kwargs, "device_type": "cpu"})


def replacements() -> list[Replacement]:
    why = "Megatron-FSDP names CUDA devices and device meshes; the stand-in uses the CPU's"
    return [
        Replacement(f"{_FSDP}.mcore_fsdp_adapter:torch", lambda original: TorchWithCpuDevices(), why),
        Replacement(f"{_FSDP}.mcore_fsdp_adapter:DeviceMesh", lambda original: CpuDeviceMesh, why),
        Replacement(f"{_FSDP}.src.megatron_fsdp.megatron_fsdp:torch", lambda original: TorchWithCpuDevices(), why),
    ]
