"""Memory in large pages, for what is read again and again: packed weights, tables, the KV cache.

Promises: reads as zero until written, costs nothing until touched, lies in 2 MiB pages where the system gives them
(half again as much read bandwidth was measured with them); goes back to the system when the last tensor taken from
it goes.
Does not know: what is stored.
"""

import ctypes
import mmap
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Final

import torch

from octavo.base.errors import ConfigError
from octavo.base.priority import go_last

HUGE_PAGE_BYTES: Final = 2 << 20
ALIGNMENT: Final = 64  # one cache line, one vector
CHUNK_BYTES: Final = 64 << 20
_POPULATE_WRITE: Final = 23  # of madvise, from Linux 5.14; Python's mmap has no name for it
_SETTING: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def reserve(num_bytes: int, what: str) -> torch.Tensor:
    """`num_bytes` of memory as a tensor of uint8, on a 2 MiB boundary. Raises `ConfigError` naming `what`.

    Only whole large pages inside a mapping can be large, so the mapping goes on to the end of the last one, and one
    page further to have a boundary to begin at.
    """
    if num_bytes == 0:
        return torch.zeros(0, dtype=torch.uint8)
    whole_pages = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        pages = mmap.mmap(-1, whole_pages + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError):
        raise ConfigError(f"the system refuses {num_bytes} bytes for {what}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without transparent huge pages: small ones serve
            pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + num_bytes]


def populate(memory: torch.Tensor, stopped: Callable[[], bool]) -> int:
    """Have the system give this memory's pages now, a large one at a time; what they hold stays. Bytes that were given.

    Fewer than there are when `stopped` says so; none where the system cannot. Other threads may use the memory
    meanwhile.
    """
    first, end = memory.data_ptr(), memory.data_ptr() + memory.numel() * memory.element_size()
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return 0
    for at in range(first - first % mmap.PAGESIZE, end, HUGE_PAGE_BYTES):
        size = min(HUGE_PAGE_BYTES, end - at)
        if stopped() or madvise(ctypes.c_void_p(at), ctypes.c_size_t(size), _POPULATE_WRITE):
            return max(0, at - first)
    return end - first


class Populating:
    """Memory that is populated by a thread which lets everybody else go first.

    Owns: the thread.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(memory,), name="octavo-populate", daemon=True)
        self._thread.start()

    def _run(self, memory: torch.Tensor) -> None:
        go_last()
        populate(memory, self._stopped.is_set)

    def stop(self) -> None:
        """End after the page under way."""
        self._stopped.set()
        self._thread.join()


def gives_huge_pages() -> bool:
    """True when the system gives large pages to those who ask."""
    try:
        return "[never]" not in _SETTING.read_text()
    except OSError:
        return False


def large_share(tensor: torch.Tensor) -> float:
    """How much of the mapping that a tensor lies in is in large pages, of its own or of a file; 0 where nobody says."""
    inside, size, large = False, 1, 0
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return 0.0
    for line in lines:
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            low, _, high = name.partition("-")
            inside = int(low, 16) <= tensor.data_ptr() < int(high, 16)
        elif inside and name == "Size:":
            size = int(rest.split()[0])
        elif inside and name in ("AnonHugePages:", "FilePmdMapped:", "ShmemPmdMapped:"):
            large += int(rest.split()[0])
    return large / size


class PageArena:
    """Many small pieces side by side in large pages.

    Owns: the chunk that is being filled.
    """

    def __init__(self, what: str = "weights", chunk_bytes: int = CHUNK_BYTES) -> None:
        self._what = what
        self._chunk_bytes = chunk_bytes
        self._chunk = torch.zeros(0, dtype=torch.uint8)
        self._used = 0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> torch.Tensor:
        """A tensor of uint8 that starts on a cache line; it keeps its chunk alive.

        What would fill most of a chunk gets memory of its own, so that the rest of the chunk stays in use.
        """
        if num_bytes * 2 > self._chunk_bytes:
            return reserve(num_bytes, self._what)
        with self._lock:
            if self._used + num_bytes > len(self._chunk):
                self._chunk = reserve(self._chunk_bytes, self._what)
                self._used = 0
            piece = self._chunk[self._used : self._used + num_bytes]
            self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
            return piece


class ModelMemory:
    """Where a model's weights and tables lie: large pages on a CPU, the device's own memory elsewhere.

    Owns: the arena.
    """

    def __init__(self, device: torch.device | str = "cpu", what: str = "weights") -> None:
        self.device = torch.device(device)
        self._arena = PageArena(what)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that is kept; contiguous, its content is undefined. Raises `ConfigError` when there is no room."""
        if self.device.type != "cpu":
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return self._arena.take(prod(shape) * dtype.itemsize).view(dtype).view(tuple(shape))

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that is kept."""
        mine = self.empty(tensor.shape, tensor.dtype)
        return mine.copy_(tensor)


def scratch(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in host memory that is soon let go, and then is the system's again at once (malloc may keep it)."""
    return reserve(prod(shape) * dtype.itemsize, "a weight that is being packed").view(dtype).view(tuple(shape))
