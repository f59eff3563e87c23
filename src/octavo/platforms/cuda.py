"""NVIDIA GPUs through torch's CUDA build (also AMD's, which torch presents the same way).

Promises: facts are those of the moment: free memory counts what every process on the device holds.
Does not know: kernels, or which backends will run.
"""

from typing import Any

import torch

from octavo.config.facts import DeviceFacts
from octavo.platforms.api import RunSettings, torch_attribute
from octavo.platforms.cpu import CpuPlatform


class CudaPlatform:
    """The CUDA platform. `index` is the visible device whose facts are told."""

    name = "cuda"
    device_type = "cuda"
    dispatch_key = "CUDA"
    visible_variable: str | None = "CUDA_VISIBLE_DEVICES"
    communicator = "nccl"
    worker = "octavo.worker.worker:Worker"
    compile_backend = "inductor"

    def __init__(self, index: int = 0) -> None:
        self._index = index

    def __getattr__(self, name: str) -> Any:
        return torch_attribute("cuda", name)

    def available(self) -> bool:
        return torch.cuda.is_available()

    def facts(self) -> DeviceFacts:
        properties = torch.cuda.get_device_properties(self._index)
        free, total = torch.cuda.mem_get_info(self._index)
        return DeviceFacts(
            kind="cuda",
            name=properties.name,
            memory_total_bytes=total,
            memory_available_bytes=free,
            num_cores=CpuPlatform().num_cores(),
            capability=("cuda", f"sm_{properties.major}{properties.minor}"),
            count=torch.cuda.device_count(),
        )

    def adjusted(self, settings: RunSettings) -> RunSettings:
        return settings
