"""A folder of files that several engines fill, and that stays below one size (TIR-30).

Promises: room is taken before a file is written, in a ledger that all who share the folder read and write under one
lock, so that they keep to the limit together; what was used longest ago goes first; nobody waits long for the lock.
Does not know: what is in the files.

The ledger is one number, the bytes in the folder, in `<root>/.octavo-ledger`. It is counted anew now and then, and when
it is not there: files come and go by other hands, too. Where a file system knows no locks, each engine counts alone.
"""

import contextlib
import fcntl
import os
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

RESCAN_S: Final = 60.0  # others write to the folder too
LOCK_S: Final = 1.0  # for a lock; one that is held for longer is held by somebody who was stopped
LOCK_AGAIN_S: Final = 0.002
STALE_S: Final = 3600.0  # age of a half-written file that nobody can be working on
FRESH_S: Final = 60.0  # of one that somebody may be working on whose process is not seen from here, as in a container
LOOKS_AGAIN: Final = 3  # at a folder in which files got their names while it was looked at
LEDGER: Final = ".octavo-ledger"
NUMBER: Final = struct.Struct("<q")


class _File(NamedTuple):
    size: int
    used_ns: int  # when it was last written or read, as far as is known


class SharedFolder:
    """Owns: the list of the folder's files by age, as of the last count and what was written here since."""

    def __init__(self, root: Path, limit: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._limit = limit
        self._clock = clock
        self._files: OrderedDict[Path, _File] = OrderedDict()
        self._held = 0  # what this engine believes, where there is no ledger
        self._scanned_at = -RESCAN_S

    def take(self, size: int) -> bool:
        """Room for a file of this size, by removing others. False: there is none. Raises `OSError`."""
        if self._limit is None:
            if self._is_due:
                self._scan()  # what dead processes left is cleared away all the same
            return True
        with self._ledger() as ledger:
            is_new = self._is_due
            held = self._counted(ledger)
            held = self._make_room(held, size, self._limit)
            if held + size > self._limit and not is_new:  # others wrote what is to go, or removed it
                held = self._make_room(self._scan(), size, self._limit)
            fits = held + size <= self._limit
            self._note(ledger, held + size if fits else held)
        return fits

    def wrote(self, path: Path, size: int) -> None:
        """The file is there, in the room that was taken for it."""
        if self._limit is not None:
            self._files[path] = _File(size, time.time_ns())

    def gave_up(self, size: int) -> None:
        """The room that was taken is not used. Raises `OSError`."""
        self._add(-size)

    def remove(self, path: Path) -> None:
        """Remove a file and count it off. Raises `OSError`."""
        freed = self._unlink(path)
        self._add(-freed)

    def forget(self) -> None:
        """Count anew at the next occasion: the folder is not what it was."""
        self._scanned_at = -RESCAN_S

    # ---- files ----------------------------------------------------------------------------------

    def _make_room(self, held: int, size: int, limit: int) -> int:
        """Remove what was used longest ago until so much fits, as far as this engine knows files; what is held then."""
        while held + size > limit and self._files:
            path, file = next(iter(self._files.items()))
            with contextlib.suppress(OSError):
                if (used_ns := path.stat().st_mtime_ns) > file.used_ns:  # since it was listed
                    self._files[path] = _File(file.size, used_ns)
                    self._files.move_to_end(path)
                    continue
            held -= self._unlink(path)
        return held

    def _unlink(self, path: Path) -> int:
        """Bytes that this freed; 0 when somebody else removed it."""
        self._files.pop(path, None)
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return 0
        return size

    def _scan(self) -> int:
        """Count the folder's files anew, and clear away what dead processes left half-written."""
        self._scanned_at = self._clock()
        found = sorted(self._walk())
        self._files = OrderedDict((path, _File(size, ns)) for ns, path, size in found if path.suffix == ".kv")
        return sum(size for _, _, size in found)

    def _walk(self) -> Iterator[tuple[int, Path, int]]:
        for folder, _, names in os.walk(self._root):
            found, is_whole = _look_at(folder, names)
            for _ in range(LOOKS_AGAIN):
                if is_whole:
                    break
                found, is_whole = _look_at(folder, os.listdir(folder))
            yield from found

    # ---- the ledger -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _ledger(self) -> Iterator[int | None]:
        """Its descriptor, with the lock; None where there are no locks. Raises `OSError`."""
        descriptor = os.open(self._root / LEDGER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            yield descriptor if _lock(descriptor) else None
        finally:
            os.close(descriptor)  # which also gives back the lock

    @property
    def _is_due(self) -> bool:
        return self._clock() - self._scanned_at >= RESCAN_S

    def _counted(self, ledger: int | None) -> int:
        """What the folder holds."""
        if self._is_due:
            return self._scan()
        if ledger is None:
            return self._held
        data = os.pread(ledger, NUMBER.size, 0)
        return int(NUMBER.unpack(data)[0]) if len(data) == NUMBER.size else self._scan()

    def _note(self, ledger: int | None, held: int) -> None:
        self._held = held
        if ledger is not None:
            os.pwrite(ledger, NUMBER.pack(held), 0)

    def _add(self, size: int) -> None:
        if self._limit is None or not size:
            return
        with self._ledger() as ledger:
            self._note(ledger, max(0, self._counted(ledger) + size))


def _lock(descriptor: int) -> bool:
    """Whether there are locks here, and it is ours. Raises `TimeoutError` when somebody keeps it."""
    until = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError("another engine keeps the folder's lock") from None
            time.sleep(LOCK_AGAIN_S)
        except OSError:
            return False


def _look_at(folder: str, names: Iterable[str]) -> tuple[list[tuple[int, Path, int]], bool]:
    """The files of these names; and False when one got its name since they were listed, and is among them by none.

    What dead processes left half-written is removed.
    """
    found, is_whole = [], True
    for name in names:
        path = Path(folder, name)
        try:
            facts = path.stat()
            if name.endswith(".part") and _is_left(name, time.time() - facts.st_mtime):
                path.unlink()
            elif name.endswith((".kv", ".part")):
                found.append((facts.st_mtime_ns, path, facts.st_size))
        except OSError:
            is_whole = is_whole and not name.endswith(".part")
    return found, is_whole


def _is_left(name: str, age_s: float) -> bool:
    """True for a half-written file whose writer is gone."""
    if abs(age_s) < FRESH_S:
        return False
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
