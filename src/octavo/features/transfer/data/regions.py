"""KV memory and host memory as bytes: which bytes a chunk is.

Promises: a chunk's bytes are in the order of its group's layers, whatever the layout of the cache; ranges that touch
are one copy.
Does not know: what the bytes mean, or who asked.
"""

import mmap

import numpy as np
from torch import Tensor

from octavo.base.errors import ConfigError
from octavo.base.kvspec import KVLayout
from octavo.features.transfer.data.api import Bytes
from octavo.worker.memory import KVMemory


class KVRegion:
    """One group's blocks in the cache buffer of a CPU.

    Owns: nothing; the buffer is the worker's.
    """

    def __init__(self, layout: KVLayout, group: int, buffer: Tensor) -> None:
        page = layout.groups[group].spec.page_bytes
        places = [place for place in layout.places if place.group == group]
        self.chunk_bytes = page * len(places)
        self._memory: Bytes = buffer.numpy()
        self._spans: list[tuple[int, int, int, int]] = []  # offset, stride, bytes, place in the chunk
        for at, place in enumerate(places):
            last = self._spans[-1] if self._spans else None
            if last is not None and place.offset == last[0] + last[2] and place.block_stride == last[1]:
                self._spans[-1] = (last[0], last[1], last[2] + page, last[3])
            else:
                self._spans.append((place.offset, place.block_stride, page, at * page))

    @property
    def spans(self) -> tuple[tuple[int, int, int], ...]:
        """What a block is made of, in order: address of block 0, stride from block to block, bytes."""
        base = self._memory.ctypes.data
        return tuple((base + offset, stride, size) for offset, stride, size, _ in self._spans)

    @property
    def extent(self) -> tuple[int, int]:
        """Address and bytes of the memory that all blocks lie in."""
        return self._memory.ctypes.data, self._memory.nbytes

    def read(self, block: int, row: Bytes) -> None:
        """Copy a block's bytes to the beginning of `row`."""
        for offset, stride, size, at in self._spans:
            start = offset + block * stride
            row[at : at + size] = self._memory[start : start + size]

    def write(self, block: int, row: Bytes) -> None:
        """The other way."""
        for offset, stride, size, at in self._spans:
            start = offset + block * stride
            self._memory[start : start + size] = row[at : at + size]


def regions_of(memory: KVMemory, option: str) -> tuple[KVRegion, ...]:
    """One region for each group. Raises `ConfigError`, naming the option that needs them, on another device than a CPU."""
    if memory.buffer.device.type != "cpu":
        raise ConfigError(f"{option} works on a CPU only for now; leave it out here")
    return tuple(KVRegion(memory.layout, group.index, memory.buffer) for group in memory.layout.groups)


class HostRegion:
    """The primary tier's rows, in one mapping. Workers in other processes will need it by a name (TIR-1).

    Memory is given by the system when a row is first written.

    Owns: the mapping.
    """

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self._mapping = mmap.mmap(-1, num_rows * row_bytes)
        self._rows = np.frombuffer(self._mapping, dtype=np.uint8).reshape(num_rows, row_bytes)

    def __getitem__(self, row: int) -> Bytes:
        out: Bytes = self._rows[row]
        return out
