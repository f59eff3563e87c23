"""KV memory and host memory as bytes: which bytes a chunk is.

Promises: a chunk's bytes are in the order of its group's layers, whatever the layout of the cache; ranges that touch
are one copy.
Does not know: what the bytes mean, or who asked.
"""

import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from octavo.base.errors import ConfigError
from octavo.base.kvspec import KVLayout
from octavo.features.transfer.data.api import Bytes
from octavo.ops import spare
from octavo.worker.memory import KVMemory

READY_BYTES: Final = 32 << 20  # of rows, made ready while nobody waits: a fresh page costs more than what goes into it


class KVRegion:
    """One group's blocks in the cache buffer of a CPU.

    Owns: nothing; the buffer is the worker's.
    """

    def __init__(self, layout: KVLayout, group: int, buffer: Tensor) -> None:
        page = layout.groups[group].spec.page_bytes
        places = [place for place in layout.places if place.group == group]
        self.chunk_bytes = page * len(places)
        self._memory: Bytes = buffer.numpy()
        self._buffer = buffer
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

    def read_in_step(self, block: int, row: Bytes) -> None:
        """The same, by all compute threads: for the thread that drives them, and no other."""
        for offset, stride, size, at in self._spans:
            start = offset + block * stride
            torch.from_numpy(row[at : at + size]).copy_(self._buffer[start : start + size])

    def write(self, block: int, row: Bytes) -> None:
        """The other way."""
        for offset, stride, size, at in self._spans:
            start = offset + block * stride
            self._memory[start : start + size] = row[at : at + size]


class LayerRegion:
    """One layer's share of its group's blocks, in the cache buffer of a CPU.

    Owns: nothing; the buffer is the worker's.
    """

    def __init__(self, layout: KVLayout, layer: int, buffer: Tensor) -> None:
        place = next(place for place in layout.places if place.layer == layer)
        self.group = place.group
        self.page_bytes = layout.groups[place.group].spec.page_bytes
        shape, strides = (layout.num_blocks, self.page_bytes), (place.block_stride, 1)
        self._pages: Bytes = as_strided(buffer.numpy()[place.offset :], shape, strides)

    def read(self, blocks: Sequence[int], rows: Bytes) -> None:
        """Copy the layer's bytes of these blocks to `rows` [blocks, page bytes]."""
        rows[:] = self._pages[list(blocks)]

    def write(self, blocks: Sequence[int], rows: Bytes) -> None:
        """The other way."""
        self._pages[list(blocks)] = rows


def layers_of(memory: KVMemory) -> tuple[LayerRegion, ...]:
    """One region for each layer, on a CPU."""
    layout = memory.layout
    return tuple(LayerRegion(layout, layer, memory.buffer) for layer in range(len(layout.places)))


def regions_of(memory: KVMemory, option: str) -> tuple[KVRegion, ...]:
    """One region for each group. Raises `ConfigError`, naming the option that needs them, on another device than a CPU."""
    if memory.buffer.device.type != "cpu":
        raise ConfigError(f"{option} works on a CPU only for now; leave it out here")
    return tuple(KVRegion(memory.layout, group.index, memory.buffer) for group in memory.layout.groups)


class RegionPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where another process of the same user and machine finds the rows, as long as their owner runs (TIR-1)."""

    path: str
    num_rows: int
    row_bytes: int


class HostRegion:
    """The primary tier's rows, in one mapping that other processes can attach to (see `HostView`).

    Memory is given by the system when a row is first written, or somewhat before it is (`make_ready`), in large pages
    where it has them for shared memory. It
    has no name in any folder: what leads to it is the owner's file descriptor, so nothing is left of an engine that
    was killed.

    Owns: the mapping, and the descriptor of its memory.
    """

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        size = num_rows * row_bytes
        fd = _nameless_file(size)
        self.place: RegionPlace | None = None  # None where the system has no such memory
        if fd is not None:
            self._close = weakref.finalize(self, os.close, fd)
            path = f"/proc/{os.getpid()}/fd/{fd}"
            self.place = RegionPlace(path=path, num_rows=num_rows, row_bytes=row_bytes)
        self._mapping = mmap.mmap(-1 if fd is None else fd, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without large pages for shared memory: small ones serve
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._memory: Bytes = np.frombuffer(self._mapping, dtype=np.uint8)
        self._memory[:READY_BYTES] = 0
        self._ready = min(READY_BYTES, size)  # bytes
        self._wanted = self._ready
        self._rows = self._memory.reshape(num_rows, row_bytes)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Bytes:
        out: Bytes = self._rows[row]
        return out

    @property
    def extent(self) -> tuple[int, int]:
        """Address and bytes of all rows, which follow each other."""
        return self._memory.ctypes.data, self._memory.nbytes

    def wants_ahead(self, row: int) -> bool:
        """True when `row`, now in use, is close to those that the system has given no memory for; then `make_ready` is
        to be called, by one thread, and not by one that steps wait for."""
        wanted = min((row + 1) * self._rows.shape[1] + READY_BYTES, self._memory.nbytes)
        if wanted < min(self._wanted + READY_BYTES // 2, self._memory.nbytes) or wanted <= self._wanted:
            return False
        self._wanted = wanted
        return True

    def make_ready(self) -> None:
        """Memory for rows that are next, as far as the system can be asked for it. What rows hold stays."""
        begin, self._ready = self._ready, self._wanted
        spare.populate(self._memory[begin : self._ready])

    def close(self) -> None:
        """Nobody attaches any more. The memory lives as long as anybody still uses it."""
        if self.place is not None:
            self.place = None
            self._close()


class HostView:
    """Another process's rows, to be read and not written. What is in a row is the owner's matter, and may change.

    Owns: a mapping.
    """

    def __init__(self, place: RegionPlace) -> None:
        """Raises `OSError` when the owner is gone."""
        with open(place.path, "rb") as file:
            self._mapping = mmap.mmap(file.fileno(), place.num_rows * place.row_bytes, access=mmap.ACCESS_READ)
        self._rows = np.frombuffer(self._mapping, dtype=np.uint8).reshape(place.num_rows, place.row_bytes)

    def __getitem__(self, row: int) -> Bytes:
        out: Bytes = self._rows[row]
        return out


def _nameless_file(size: int) -> int | None:
    """Memory as a file that is in no folder and keeps its size; None where there is no such thing."""
    if not hasattr(os, "memfd_create"):
        return None
    fd = os.memfd_create("octavo-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        with suppress(OSError):  # a reader whose memory shrinks dies of it
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd
