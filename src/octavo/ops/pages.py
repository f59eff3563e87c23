"""Memory in large pages, for what is read again and again: packed weights, the KV cache.

Promises: reads as zero until written, costs nothing until touched, lies in 2 MiB pages where the system gives them
(half again as much read bandwidth was measured with them); lives as long as any tensor taken from it.
Does not know: what is stored.
"""

import mmap
import threading
from contextlib import suppress
from typing import Final

import torch

from octavo.base.errors import ConfigError

HUGE_PAGE_BYTES: Final = 2 << 20
ALIGNMENT: Final = 64  # one cache line, one vector
CHUNK_BYTES: Final = 64 << 20


def reserve(num_bytes: int, what: str) -> torch.Tensor:
    """`num_bytes` of memory as a tensor of uint8, on a 2 MiB boundary. Raises `ConfigError` naming `what`."""
    if num_bytes == 0:
        return torch.zeros(0, dtype=torch.uint8)
    try:
        pages = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError):
        raise ConfigError(f"the system refuses {num_bytes} bytes for {what}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without transparent huge pages: small ones serve
            pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + num_bytes]


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
        """A tensor of uint8 that starts on a cache line; it keeps its chunk alive."""
        with self._lock:
            if self._used + num_bytes > len(self._chunk):
                self._chunk = reserve(max(num_bytes, self._chunk_bytes), self._what)
                self._used = 0
            piece = self._chunk[self._used : self._used + num_bytes]
            self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
            return piece
