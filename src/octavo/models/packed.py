"""Files that hold packed weights, ready to be read into memory and used.

Promises: a file appears whole or not at all, whoever else writes or reads in the folder; one that is cut, changed or
not the one asked for is told apart before any of it is used; the folder stays within its size; readers read at the
memory's speed.
Does not know: what the tensors are, or when a file may be used again (see `models.fingerprint`).

A file is: the magic number, the length and the CRC-32 of a JSON header, the header, and from the next 2 MiB on the
tensors side by side, each on a cache line, exactly as they lie in memory. Written in whole large pages, it is kept in
such by a kernel whose file system can. The header holds the key, the tensors' names,
types, shapes and places, and one checksum for each 2 MiB of data: the sum of its 64-bit words, which one core computes
as fast as it reads (a CRC would take longer than the reading), and which any run of flipped bits or of zeroed or stale
pages changes.
"""

import base64
import fcntl
import json
import mmap
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from octavo.base.mapped import Bytes
from octavo.base.priority import go_last
from octavo.ops.pages import ALIGNMENT, large_share, reserve

Sums = npt.NDArray[np.uint64]

MAGIC: Final = b"OCTAVOPK"
FORMAT: Final = 2
SECTION_BYTES: Final = 2 << 20  # read and summed by one thread while it is in the cache
ENDING: Final = ".packed"
PARTIAL: Final = ".partial"
_PAGE: Final = 4096
_FIXED: Final = len(MAGIC) + 8
_MAX_HEADER_BYTES: Final = 64 << 20
_ROOM_TO_READ: Final = 1.25  # of the data's size
_LARGE_ENOUGH: Final = 0.9  # of a mapped file, in large pages
_SPARE_DISK_BYTES: Final = 1 << 30  # left free for others


class DamagedError(Exception):
    """A packed file is not what it should be; the message says in what."""


class NotWrittenError(Exception):
    """A packed file was not written; the message says why."""


@dataclass(frozen=True, slots=True)
class _Place:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # from the first byte of data

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


# ---- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A file whose header is right and whose length is what the header says."""

    path: Path
    start: int  # of the data
    num_bytes: int  # of the data
    places: tuple[_Place, ...]
    sums: Sums

    def tensors(self, num_threads: int, memory_available_bytes: int) -> dict[str, torch.Tensor]:
        """All tensors, in large pages. Raises `DamagedError` when a checksum is wrong.

        Where the kernel keeps the file itself in large pages they are mapped, which takes no time; else they are read
        into memory of our own, if there is that much, and are mapped as they are if not.
        """
        mapped = self._map()
        first = mapped[self.start : self.start + 2 * SECTION_BYTES]
        first[::_PAGE].sum()  # touched, they show what the kernel does
        if large_share(mapped) > 0:
            self._check(mapped, num_threads)
            if large_share(mapped) > _LARGE_ENOUGH:
                return self._views(mapped[self.start :])
        if memory_available_bytes < self.num_bytes * _ROOM_TO_READ:
            return self._views(mapped[self.start :])
        del first, mapped
        return self._views(self._read(num_threads))

    def _map(self) -> torch.Tensor:
        with self.path.open("rb") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # private: torch wants it writable
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=torch.uint8)

    def _check(self, mapped: torch.Tensor, num_threads: int) -> None:
        data = mapped.numpy()[self.start :]

        def right(section: int) -> bool:
            return _sum(data[section * SECTION_BYTES :][:SECTION_BYTES]) == int(self.sums[section])

        self._each_section(right, num_threads)

    def _read(self, num_threads: int) -> torch.Tensor:
        memory = reserve(self.num_bytes, "packed weights")
        room = memory.numpy()
        with self.path.open("rb", buffering=0) as file:
            self._each_section(lambda section: self._read_section(file.fileno(), room, section), num_threads)
        return memory

    def _each_section(self, right: Callable[[int], bool], num_threads: int) -> None:
        with ThreadPoolExecutor(num_threads) as pool:
            if not all(pool.map(right, range(len(self.sums)))):
                raise DamagedError("its content was changed")

    def _read_section(self, fd: int, room: Bytes, section: int) -> bool:
        first = section * SECTION_BYTES
        mine = room[first : first + SECTION_BYTES]
        done = 0
        while done < len(mine):
            count = os.preadv(fd, [mine.data[done:]], self.start + first + done)
            if not count:
                raise DamagedError(f"it is cut short at byte {self.start + first + done}")
            done += count
        return _sum(mine) == int(self.sums[section])

    def _views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        return {p.name: memory[p.offset : p.offset + p.size].view(p.dtype).view(p.shape) for p in self.places}


def open_packed(path: Path, key: str) -> PackedFile:
    """Read and check a file's header. Raises `FileNotFoundError`, or `DamagedError` saying what is wrong."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        fixed = file.read(_FIXED)
        if len(fixed) < _FIXED or not fixed.startswith(MAGIC):
            raise DamagedError("it does not begin as such a file does")
        length, crc = (int.from_bytes(fixed[i : i + 4], "little") for i in (len(MAGIC), len(MAGIC) + 4))
        text = file.read(length) if length <= _MAX_HEADER_BYTES else b""
    if len(text) != length or zlib.crc32(text) != crc:
        raise DamagedError("its header is damaged")
    header = json.loads(text)
    if header["format"] != FORMAT or header["key"] != key:
        raise DamagedError("it was made for something else")
    start = _section_after(_FIXED + length)
    if size != start + header["num_bytes"]:
        raise DamagedError(f"it has {size} bytes instead of {start + header['num_bytes']}")
    places = tuple(_Place(n, getattr(torch, d), tuple(s), o) for n, d, s, o in header["tensors"])
    sums = np.frombuffer(base64.b64decode(header["sums"]), np.uint64)
    return PackedFile(path, start, header["num_bytes"], places, sums)


def _sum(data: Bytes) -> int:
    words = len(data) // 8
    total = int(np.add.reduce(data[: words * 8].view(np.uint64)))
    return (total + int.from_bytes(data[words * 8 :].tobytes(), "little")) % (1 << 64)


def _section_after(offset: int) -> int:
    return -(-offset // SECTION_BYTES) * SECTION_BYTES


# ---- writing ------------------------------------------------------------------------------------


def write_packed(path: Path, key: str, tensors: Mapping[str, torch.Tensor], stopped: Callable[[], bool]) -> int:
    """Write a file at one stroke; its bytes. Raises `OSError`, or `NotWrittenError` when stopped or when another
    process is writing the same.

    The file grows under another name, which a lock holds: the lock of a process that has died is free, and what it
    left is written over.
    """
    places, num_bytes = _lay_out(tensors)
    partial = path.with_suffix(PARTIAL)
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(fd, partial)
        try:
            start, size = _fill(fd, key, tensors, places, num_bytes, stopped)
            os.ftruncate(fd, size)
            os.fsync(fd)
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    finally:
        os.close(fd)
    return start + num_bytes


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # whoever had it may have finished and renamed it since it was opened here
        same = os.fstat(fd).st_ino == path.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        same = False
    if not same:
        raise NotWrittenError("another process is writing it")


def _lay_out(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[_Place, ...], int]:
    places, offset = [], 0
    for name, tensor in tensors.items():
        place = _Place(name, tensor.dtype, tuple(tensor.shape), offset)
        places.append(place)
        offset += -(-place.size // ALIGNMENT) * ALIGNMENT
    return tuple(places), offset


def _fill(
    fd: int,
    key: str,
    tensors: Mapping[str, torch.Tensor],
    places: tuple[_Place, ...],
    num_bytes: int,
    stopped: Callable[[], bool],
) -> tuple[int, int]:
    """Data first, then the header in the room left for it, so that a file with a header is whole."""
    num_sections = -(-num_bytes // SECTION_BYTES)

    def header(sums: Sums) -> bytes:
        fields = {
            "format": FORMAT,
            "key": key,
            "num_bytes": num_bytes,
            "tensors": [[p.name, str(p.dtype).removeprefix("torch."), p.shape, p.offset] for p in places],
            "sums": base64.b64encode(sums.tobytes()).decode(),
        }
        text = json.dumps(fields).encode()
        return MAGIC + len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little") + text

    sums = np.zeros(num_sections, np.uint64)
    start = _section_after(len(header(sums)))  # the same for any sums
    os.ftruncate(fd, 0)
    for index, data in enumerate(_sections(tensors, places)):
        if stopped():
            raise NotWrittenError("the engine was stopped first")
        sums[index] = _sum(data)
        _write(fd, data.data, start + index * SECTION_BYTES)
    _write(fd, memoryview(header(sums)), 0)
    return start, start + num_bytes


def _sections(tensors: Mapping[str, torch.Tensor], places: tuple[_Place, ...]) -> Iterator[Bytes]:
    """The data in sections of one size; a section is valid until the next is asked for."""
    section = np.zeros(SECTION_BYTES, np.uint8)
    at = 0
    for place in places:
        data = tensors[place.name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        padded = -(-place.size // ALIGNMENT) * ALIGNMENT
        done = 0
        while done < padded:
            count = min(padded - done, SECTION_BYTES - at)
            part = data[done : done + count]
            section[at : at + len(part)] = part
            section[at + len(part) : at + count] = 0
            done, at = done + count, at + count
            if at == SECTION_BYTES:
                yield section
                at = 0
    if at:
        yield section[:at]


def _write(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


# ---- the folder ---------------------------------------------------------------------------------


class PackedFolder:
    """A folder of packed files, none of which is used longer than others need its room. Several processes may share it.

    `max_bytes` is what all files may take together.

    Owns: nothing but the folder's files, and those together with every other process.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self._max_bytes = max_bytes

    def path(self, key: str) -> Path:
        """Where the file of this key is, or would be."""
        return self.folder / f"{key[:32]}{ENDING}"

    def find(self, key: str) -> PackedFile | None:
        """The file of this key. Raises `DamagedError` when it is of no use."""
        path = self.path(key)
        try:
            found = open_packed(path, key)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DamagedError(f"it cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DamagedError("its header cannot be understood") from None
        with suppress(OSError):  # another user's file; it is then not known to be in use
            os.utime(path)
        return found

    def store(self, key: str, tensors: Mapping[str, torch.Tensor], stopped: Callable[[], bool]) -> int:
        """Write the file of this key and make room for it; its bytes. Raises `NotWrittenError` saying why not."""
        num_bytes = _lay_out(tensors)[1]
        if num_bytes > self._max_bytes:
            raise NotWrittenError(f"its {num_bytes >> 20} MiB are more than --weight-cache-size allows")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(num_bytes)
            if shutil.disk_usage(self.folder).free < num_bytes + min(_SPARE_DISK_BYTES, num_bytes):
                raise NotWrittenError(f"the disk of {self.folder} has no room for {num_bytes >> 20} MiB")
            return write_packed(self.path(key), key, tensors, stopped)
        except OSError as error:
            raise NotWrittenError(f"{self.folder}: {error.strerror or error}") from None

    def _make_room(self, num_bytes: int) -> None:
        """Remove what was used longest ago, and what writers that died have left, until `num_bytes` more fit."""
        for partial in self.folder.glob(f"*{PARTIAL}"):
            _remove_if_left(partial)
        files = []
        for path in self.folder.glob(f"*{ENDING}"):
            with suppress(FileNotFoundError):
                found = path.stat()
                files.append((found.st_mtime, found.st_blocks * 512, path))
        total = num_bytes + sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self._max_bytes:
                break
            path.unlink(missing_ok=True)  # whoever is reading it keeps it until it is done
            total -= size


def _remove_if_left(partial: Path) -> None:
    with suppress(OSError, NotWrittenError):
        fd = os.open(partial, os.O_RDWR | os.O_CLOEXEC)
        try:
            _lock(fd, partial)
            partial.unlink()
        finally:
            os.close(fd)


class Writing:
    """A file that is being written by a thread, while the weights are already in use.

    Owns: the thread.
    """

    def __init__(
        self, folder: PackedFolder, key: str, tensors: Mapping[str, torch.Tensor], say: Callable[[str], None]
    ) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(folder, key, tensors, say), name="octavo-pack", daemon=True
        )
        self._thread.start()

    def _run(
        self, folder: PackedFolder, key: str, tensors: Mapping[str, torch.Tensor], say: Callable[[str], None]
    ) -> None:
        try:
            go_last()  # the first requests go before
            folder.store(key, tensors, self._stopped.is_set)
        except NotWrittenError as error:
            if not self._stopped.is_set():
                say(f"packed weights are not kept for the next start: {error}")

    def stop(self, patience_s: float) -> None:
        """Wait for the end, up to so many seconds, then give up what is not written yet."""
        self._thread.join(patience_s)
        self._stopped.set()
        self._thread.join()
