"""Files mapped into memory, read-only in effect.

Promises: nothing is read before it is touched; pages that were used can be given back; writes never reach the file.
Does not know: what the bytes mean.
"""

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from octavo.base.errors import LoadError

Bytes = npt.NDArray[np.uint8]


class MappedFile:
    """One file's bytes.

    Owns: the mapping. It lives as long as any view of it.
    """

    def __init__(self, path: Path) -> None:
        """Raises `LoadError` for a file that is missing, empty or cannot be read."""
        self.path = path
        try:
            with path.open("rb") as file:
                # a private mapping counts as writable, so that torch takes it without a warning
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise LoadError(f"{path} does not exist") from None
        except ValueError:
            raise LoadError(f"{path} is empty (an interrupted download?); fetch it again") from None
        except OSError as error:
            raise LoadError(f"{path} cannot be read: {error.strerror}") from None
        self._bytes: Bytes = np.frombuffer(self.data, np.uint8)
        if self.data[:32].startswith(b"version https://git-lfs"):
            raise LoadError(f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder")

    def __len__(self) -> int:
        return len(self.data)

    def view(self, start: int, size: int) -> Bytes:
        """These bytes, without a copy."""
        return self._bytes[start : start + size]

    def prefetch(self, start: int, size: int) -> None:
        """Let the system begin to read these bytes, without waiting for it."""
        page = mmap.PAGESIZE
        first = start // page * page
        if hasattr(mmap, "MADV_WILLNEED") and size:
            self.data.madvise(mmap.MADV_WILLNEED, first, start + size - first)

    def forget(self, start: int, size: int) -> None:
        """Give the memory of these bytes back; they are read from the file again when touched."""
        page = mmap.PAGESIZE
        first, last = -(-start // page) * page, (start + size) // page * page
        if hasattr(mmap, "MADV_DONTNEED") and last > first:
            self.data.madvise(mmap.MADV_DONTNEED, first, last - first)
