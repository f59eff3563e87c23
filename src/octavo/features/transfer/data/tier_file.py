"""Chunks as files: they outlive the process, and engines on one machine share them (TIR-30).

Promises: a file appears whole or not at all; one that is foreign, cut off or altered is a miss and is removed; the
folder keeps to its limit; a full or read-only disk loses stores and nothing else; writing takes only processor time
that nobody else wants.
Does not know: what a chunk holds, or how it is sealed (see `seal`).

A file is `<root>/<fingerprint>/<2 digits>/<key>.kv`. Files of another fingerprint lie in another folder and count toward
the same limit.
"""

import contextlib
import errno
import io
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from octavo.base.errors import ConfigError
from octavo.features.transfer.address import TierAddress
from octavo.features.transfer.data.api import Bytes
from octavo.features.transfer.data.seal import Seal
from octavo.ops import spare

log = logging.getLogger(__name__)

RESCAN_S: Final = 60.0  # others write to the folder too
REST_S: Final = 5.0  # after the disk was full, before it is tried again
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
STALE_S: Final = 3600.0  # age of a half-written file that nobody can be working on


class _File(NamedTuple):
    size: int
    used_ns: int  # when it was last written or read, as far as is known


class FileTier:
    """A folder.

    Owns: the list of the folder's files by age, and how much they hold.
    """

    def __init__(
        self,
        root: Path,
        seal: Seal,
        *,
        limit: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `ConfigError` when there can be no such folder."""
        self._root = root
        self._folder = root / seal.space
        self._seal = seal
        self._limit = limit
        self._clock = clock
        self._files: OrderedDict[Path, _File] = OrderedDict()
        self._held = 0
        self._scanned_at = -RESCAN_S
        self._rests_until = -REST_S
        self._count = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--kv-tier file://{root}: the folder cannot be made: {error.strerror}") from None

    # ---- what tiers do ----------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        return [self._path(key).exists() for key in keys]

    def read(self, keys: Sequence[bytes], rows: Sequence[Bytes]) -> list[bool]:
        return [self._read(key, row) for key, row in zip(keys, rows, strict=True)]

    def write(self, keys: Sequence[bytes], rows: Sequence[Bytes]) -> list[bool]:
        if self._clock() < self._rests_until:
            return [False] * len(keys)
        self._scan()
        return [self._write(key, row) for key, row in zip(keys, rows, strict=True)]

    def close(self) -> None:
        return None

    # ---- one chunk ----------------------------------------------------------------------------------

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / f"{name}.kv"

    def _read(self, key: bytes, row: Bytes) -> bool:
        path, length = self._path(key), self._seal.length(key)
        try:
            with path.open("rb", buffering=0) as file:
                head = file.read(self._seal.head_bytes(key))
                body = row.data[:length]
                got = _read_into(file, body)
                whole = got == length and not file.read(1)
        except FileNotFoundError:
            return False
        except OSError as error:
            log.warning("a KV file could not be read: %s", error)
            return False
        if not whole or not self._seal.opens(key, head, body):
            log.warning("%s is not a chunk of ours or was altered, and is removed", path)
            self._remove(path)
            return False
        now = time.time_ns()
        with contextlib.suppress(OSError):
            os.utime(path, ns=(now, now))  # what was used last goes last, for all that share the folder
        return True

    def _write(self, key: bytes, row: Bytes) -> bool:
        path, length = self._path(key), self._seal.length(key)
        if path.exists():
            return True
        body = row.data[:length]
        head = self._seal.head(key, body, spare.crc32)
        size = len(head) + length
        if not self._make_room(size):
            return False
        self._count += 1
        part = path.parent / f".{os.getpid()}.{self._count}.part"
        try:
            path.parent.mkdir(exist_ok=True)
            with part.open("wb", buffering=0) as file:
                file.write(head)
                _write_all(file, body)
            part.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            if error.errno in FULL or error.errno == errno.EROFS:
                self._rests_until = self._clock() + REST_S
            log.warning("a KV file could not be written: %s", error)
            return False
        self._files[path] = _File(size, time.time_ns())
        self._held += size
        return True

    # ---- the folder ---------------------------------------------------------------------------------

    def _make_room(self, size: int) -> bool:
        if self._limit is None:
            return True
        while self._held + size > self._limit and self._files:
            path, file = next(iter(self._files.items()))
            with contextlib.suppress(OSError):
                if (used_ns := path.stat().st_mtime_ns) > file.used_ns:  # since it was listed
                    self._files[path] = _File(file.size, used_ns)
                    self._files.move_to_end(path)
                    continue
            self._remove(path)
        return self._held + size <= self._limit

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()
        if (file := self._files.pop(path, None)) is not None:
            self._held -= file.size

    def _scan(self) -> None:
        """Count the folder's files anew, now and then, and clear away what dead processes left half-written."""
        if self._clock() - self._scanned_at < RESCAN_S:
            return
        self._scanned_at = self._clock()
        found = sorted(self._walk())
        self._files = OrderedDict((path, _File(size, used_ns)) for used_ns, path, size in found)
        self._held = sum(file.size for file in self._files.values())

    def _walk(self) -> Iterator[tuple[int, Path, int]]:
        for folder, _, names in os.walk(self._root):
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(OSError):
                    facts = path.stat()
                    if name.endswith(".kv"):
                        yield facts.st_mtime_ns, path, facts.st_size
                    elif name.endswith(".part") and _is_left(name, time.time() - facts.st_mtime):
                        path.unlink()


def _is_left(name: str, age_s: float) -> bool:
    """True for a half-written file whose writer is gone."""
    digits = name.lstrip(".").partition(".")[0]
    if not digits.isdigit() or age_s > STALE_S:
        return True
    try:
        os.kill(int(digits), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # somebody else's process
    return False


def _read_into(file: io.FileIO, body: memoryview) -> int:
    got = 0
    while got < len(body):
        count = file.readinto(body[got:])
        if not count:
            break
        got += count
    return got


def _write_all(file: io.FileIO, piece: memoryview) -> None:
    while len(piece):
        piece = piece[spare.write(file.fileno(), piece) :]


def make(address: TierAddress, seal: Seal) -> FileTier:
    """The tier of a `file://` address."""
    return FileTier(Path(address.place), seal, limit=address.size)
