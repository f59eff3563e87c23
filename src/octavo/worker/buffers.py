"""Arrays that live as long as the worker: written on the host, read by the device.

Promises: allocated once at full size; on a CPU the tensor and the array are the same memory, elsewhere the host
side is pinned and one copy brings it over.
Does not know: what the numbers mean.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class StepBuffer:
    """One persistent int64 array of the step's inputs.

    Owns: the host array and the device tensor.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        here = device.type == "cpu"
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=not here)
        self._device = self._host if here else torch.zeros(size, dtype=torch.int64, device=device)
        self._array: npt.NDArray[np.int64] = self._host.numpy()

    @property
    def whole(self) -> Tensor:
        """All elements on the device."""
        return self._device

    def room(self, count: int) -> npt.NDArray[np.int64]:
        """The first `count` elements, to write. Raises `RuntimeError` when there are fewer."""
        if count > len(self._array):
            raise RuntimeError(f"a step of {count} tokens does not fit the buffers made for {len(self._array)}")
        return self._array[:count]

    def tensor(self, count: int) -> Tensor:
        """The first `count` elements on the device; valid until the next step writes."""
        if self._device is not self._host:
            self._device[:count].copy_(self._host[:count], non_blocking=True)
        return self._device[:count]


def to_device(array: "npt.NDArray[np.int64] | npt.NDArray[np.int32]", device: torch.device) -> Tensor:
    """A small array of one step as a tensor."""
    return torch.from_numpy(array).to(device)
