"""Chunks as files: they outlive the process, and engines on one machine share them (TIR-30).

Promises: a file appears whole or not at all; one that is foreign, cut off or altered is a miss and is removed; a folder
that is full, read-only or gone loses stores and nothing else, and is used again when it can be; writing takes only
processor time that nobody else wants.
Does not know: what a chunk holds, how it is sealed (see `seal`), or how the folder keeps to its limit (see `folder`).

A file is `<root>/<fingerprint>/<2 digits>/<key>.kv`. Files of another fingerprint lie in another folder and count toward
the same limit.
"""

import contextlib
import io
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from octavo.base.errors import ConfigError
from octavo.features.transfer.address import TierAddress
from octavo.features.transfer.data.api import Bytes
from octavo.features.transfer.data.folder import SharedFolder
from octavo.features.transfer.data.health import TierHealth
from octavo.features.transfer.data.seal import Seal
from octavo.ops import spare


class FileTier:
    """A folder.

    Owns: this engine's view of the folder.
    """

    def __init__(
        self,
        root: Path,
        seal: Seal,
        health: TierHealth,
        *,
        limit: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `ConfigError` when there can be no such folder."""
        self._folder = root / seal.space
        self._seal = seal
        self._health = health
        self._shared = SharedFolder(root, limit, clock)
        self._count = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--kv-tier file://{root}: the folder cannot be made: {error.strerror}; "
                "name one that this user may write to"
            ) from None

    # ---- what tiers do ----------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        return [self._is_there(self._path(key)) for key in keys]

    def read(self, keys: Sequence[bytes], rows: Sequence[Bytes]) -> list[bool]:
        return [self._read(key, row) for key, row in zip(keys, rows, strict=True)]

    def write(self, keys: Sequence[bytes], rows: Sequence[Bytes]) -> list[bool]:
        return [not self._health.rests and self._write(key, row) for key, row in zip(keys, rows, strict=True)]

    def close(self) -> None:
        return None

    def cool(self, keys: Sequence[bytes]) -> None:
        """Have the next read of these come from the disk: nothing of them is kept in memory. Raises `OSError`."""
        for key in keys:
            with self._path(key).open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def remove(self, keys: Sequence[bytes]) -> None:
        """These are not needed any more. Raises `OSError`."""
        for key in keys:
            self._shared.remove(self._path(key))

    # ---- one chunk ----------------------------------------------------------------------------------

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / f"{name}.kv"

    def _is_there(self, path: Path) -> bool:
        """There is something; what may not be looked at, or cannot, is not there, which is said."""
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            self._health.note("unread", f"a file could not be looked at: {error}")
            return False
        return True

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
            self._health.note("unread", f"a file could not be read: {error}")
            return False
        if not whole or not self._seal.opens(key, head, body):
            self._health.note("odd", f"{path} is not a chunk of ours or was altered, and is removed")
            with contextlib.suppress(OSError):  # on a disk that is read-only it stays, and is a miss all the same
                self._shared.remove(path)
            return False
        now = time.time_ns()
        with contextlib.suppress(OSError):
            os.utime(path, ns=(now, now))  # what was used last goes last, for all that share the folder
        return True

    def _write(self, key: bytes, row: Bytes) -> bool:
        path, length = self._path(key), self._seal.length(key)
        if self._is_there(path):
            return True
        body = row.data[:length]
        head = self._seal.head(key, body, spare.crc32)
        size = len(head) + length
        try:
            if not self._folder.is_dir():  # somebody has deleted it
                self._shared.forget()
            path.parent.mkdir(parents=True, exist_ok=True)
            if not self._shared.take(size):
                return False
            self._put(path, head, body)
        except OSError as error:
            self._health.failed(error)
            return False
        self._shared.wrote(path, size)
        self._health.worked()
        return True

    def _put(self, path: Path, head: bytes, body: memoryview) -> None:
        """Write a file for which there is room. Raises `OSError`, and then there is nothing of it."""
        self._count += 1
        part = path.parent / f".{os.getpid()}.{threading.get_ident()}.{self._count}.part"
        try:
            with part.open("wb", buffering=0) as file:
                file.write(head)
                _write_all(file, body)
            part.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
            with contextlib.suppress(OSError):  # then it is counted anew some time
                self._shared.gave_up(len(head) + len(body))
            raise


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


def make(address: TierAddress, seal: Seal, health: TierHealth) -> FileTier:
    """The tier of a `file://` address. Raises `ConfigError` when there can be no such folder."""
    return FileTier(Path(address.place), seal, health, limit=address.size)
