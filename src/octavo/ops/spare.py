"""Passes over much memory, and system calls on it, in processor time that nobody else wants: for what no step waits for.

Promises: the same as `os` and `zlib` give, made by a thread of the lowest class while the caller waits without the
interpreter's lock; without the native core they are made as they are.
Does not know: what is written, or why.

The caller's own thread keeps its class: Python held up with its lock in its hands would hold up everybody.
"""

import mmap
import os
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    from octavo.ops.native import core
except ImportError:
    core: Any = None  # type: ignore[no-redef]


def write(file: int, data: memoryview) -> int:
    """Bytes of `data` that were written to the descriptor. Raises `OSError` when none could be."""
    if core is None or not data.contiguous or not len(data):
        return os.write(file, data)
    return _count(core.spare_write(file, _address(data), data.nbytes))


def crc32(data: memoryview) -> int:
    """CRC-32 of the bytes, as `zlib` computes it."""
    if core is None or not data.contiguous or not len(data):
        return zlib.crc32(data)
    out: int = core.spare_crc32(_address(data), data.nbytes)
    return out


def populate(memory: npt.NDArray[np.uint8]) -> bool:
    """Have the system give memory for these bytes of a mapping, which keep what they hold: a fresh page costs more than
    what is copied to it. False where it cannot be asked, or has none. (`pages.populate` is for large pages.)"""
    if core is None:
        return False
    before = memory.ctypes.data % mmap.PAGESIZE
    result: int = core.spare_populate(memory.ctypes.data - before, memory.nbytes + before)
    return result == 0


def _address(data: memoryview) -> int:
    return np.frombuffer(data, dtype=np.uint8).ctypes.data


def _count(result: int) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result
