"""The cache folder of models: what is in it, what is half fetched, who uses what, and how it goes.

    CACHE/SmolLM2-135M-Instruct.Q4_1.gguf    the built-in model
    CACHE/hub/owner--name--@rev--Q4_K_M/     a model of a hub, with .octavo.json: what it is and at which commit
    CACHE/.partial/owner--name/              what an interrupted pull has so far; the next one goes on from it
    CACHE/.partial/owner--name~lock          held while somebody pulls it

Promises: a model is in `hub` whole or not at all; two processes never write one model at once; what a running engine
holds is not removed; what is older than `STALE_S` and half fetched goes.
Does not know: where models come from (see `config.pull`).
"""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR
from typing import Final

import msgspec

from octavo.base.errors import LoadError
from octavo.config.hub_files import HubFile
from octavo.config.names import EMBEDDED_FILE, EMBEDDED_NAME, HubName, hub_name, is_embedded

RECORD: Final = ".octavo.json"
PARTIAL: Final = ".partial"
LOCK: Final = "~lock"  # no name of a model has this character
STALE_S: Final = 30 * 86400.0
_LEFTOVER_S: Final = 86400.0  # folders that versions before this one left when they were ended
_POLL_S: Final = 0.2


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder holds, written beside it."""

    name: str  # as it was asked for
    commit: str
    tag: str | None = None  # of the GGUF file, chosen by whoever asked or for them
    files: tuple[HubFile, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model in the cache folder, whole or half fetched."""

    name: str
    place: Path  # the folder or file that is removed with it
    model: Path  # the folder or file that is served
    size: int  # bytes on disk
    partial: bool = False
    record: Record | None = None
    used_s: float | None = None  # when an engine last started with it, in seconds since 1970

    @property
    def commit(self) -> str | None:
        """The commit it was pinned to, where that is known."""
        return None if self.record is None else self.record.commit

    @property
    def wanted(self) -> int | None:
        """Bytes it has when whole, where that is known."""
        sizes = [f.size for f in self.record.files] if self.record else []
        return None if not sizes or None in sizes else sum(s for s in sizes if s is not None)


class Store:
    """The models under a cache folder.

    Owns: nothing but the files, and those together with every other process.
    """

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self._hub = cache / "hub"
        self._partial = cache / PARTIAL

    # ---- finding -----------------------------------------------------------------------------

    def find(self, name: HubName) -> Path | None:
        """The model that is served under this name, when it is here and whole."""
        place = self.place(name)
        if read_record(place) is None and _holds_model(
            place
        ):  # of a version that kept no records, or put there by hand
            return _model_of(place)
        for entry in self._whole():
            if entry.record is not None and _means(name, entry.record):
                return entry.model
        return None

    def place(self, name: HubName) -> Path:
        """Its folder, there or not."""
        return self._hub / name.folder

    def entries(self) -> list[Entry]:
        """Everything that is here, by name; half fetched models last."""
        found = self._whole()
        built_in = self.cache / EMBEDDED_FILE
        with suppress(OSError):
            stat = built_in.stat()
            used = stat.st_atime if stat.st_atime > stat.st_mtime else None
            found.append(Entry(name=EMBEDDED_NAME, place=built_in, model=built_in, size=stat.st_size, used_s=used))
        return sorted(found, key=lambda e: e.name.lower()) + self._halves()

    def named(self, name: str) -> list[Entry]:
        """The entries that a name, or the path of one, means."""
        entries = self.entries()
        by_path = [e for e in entries if os.path.abspath(name) in (str(e.place.absolute()), str(e.model.absolute()))]
        if by_path:
            return by_path
        if is_embedded(name):
            return [e for e in entries if e.name == EMBEDDED_NAME]
        asked = hub_name(name)
        found = [e for e in entries if e.record is not None and _means(asked, e.record)]
        return found or [e for e in entries if e.place.name == asked.folder]

    def _whole(self) -> list[Entry]:
        found = []
        for place in _folders(self._hub):
            record = read_record(place)
            if record is None and not _holds_model(place):
                continue
            used = None
            with suppress(OSError):
                used = (place / RECORD).stat().st_mtime
            name = record.name if record else place.name.replace("--", "/", 1)
            found.append(
                Entry(name=name, place=place, model=_model_of(place), size=_size(place), record=record, used_s=used)
            )
        return found

    def _halves(self) -> list[Entry]:
        found = []
        for place in _folders(self._partial):
            record = read_record(place)
            name = record.name if record else place.name.replace("--", "/", 1)
            size = _size(place)
            found.append(Entry(name=name, place=place, model=place, size=size, record=record, partial=True))
        return found

    # ---- fetching ----------------------------------------------------------------------------

    @contextmanager
    def pulling(self, folder: str, say: Callable[[str], None]) -> Iterator[Path]:
        """A folder to fetch into, nobody else's while the block runs; what is in it stays for the next time."""
        lock, place = self._partial / f"{folder}{LOCK}", self._partial / folder
        try:
            self.clean()
            fd = _wait_for(lock, folder, say)
            try:
                place.mkdir(exist_ok=True)
                yield place
            finally:
                with suppress(OSError):
                    place.rmdir()  # when nothing has come
                _give(lock, fd)
        except OSError as error:
            raise LoadError(
                f"the cache folder {self.cache} cannot be written ({error.strerror or error}); set OCTAVO_CACHE to a "
                "folder that can"
            ) from None
        finally:
            with suppress(OSError):
                self._partial.rmdir()  # when nothing is left in it

    def keep(self, partial: Path, name: HubName) -> Path:
        """What was fetched becomes a model of the cache, at one stroke; its path."""
        place = self.place(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.rename(place)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise LoadError(f"{place} is in the way and holds no model; remove it and pull again") from None
        return _model_of(place)

    def clean(self, now_s: float | None = None) -> None:
        """Remove what nobody will go on with."""
        now = time.time() if now_s is None else now_s
        for place in _folders(self._partial):
            if now - _newest(place) > STALE_S:
                with suppress(OSError, BlockingIOError), _locked(self._partial / f"{place.name}{LOCK}"):
                    shutil.rmtree(place)
        for left in (*self.cache.glob(".pull-*"), *self._hub.glob(".pull-*")):
            if now - _newest(left) > _LEFTOVER_S:
                shutil.rmtree(left, ignore_errors=True)

    # ---- removing ----------------------------------------------------------------------------

    def remove(self, entry: Entry) -> None:
        """Remove it from disk; raises `LoadError` while somebody uses or fetches it, or when it cannot be removed."""
        lock = self._partial / f"{entry.place.name}{LOCK}" if entry.partial else entry.place
        try:
            with _locked(lock):
                if entry.place.is_dir():
                    shutil.rmtree(entry.place)
                else:
                    entry.place.unlink()
        except BlockingIOError:
            who = "is being fetched by another process" if entry.partial else "is in use by a running engine"
            raise LoadError(f"{entry.name} {who}; end that first") from None
        except OSError as error:
            raise LoadError(f"{entry.place} cannot be removed: {error.strerror or error}") from None
        with suppress(OSError):
            self._partial.rmdir()


class Hold:
    """Says to others, as long as it is open, that an engine uses a model of the cache.

    Owns: a descriptor; the lock goes with it, and with the process.
    """

    def __init__(self, cache: Path, model: Path) -> None:
        """Any path is fine; one outside the cache is not held, for nothing of ours removes it."""
        self._fd: int | None = None
        cache, model = cache.absolute(), model.absolute()
        inside = model.is_relative_to(cache)
        place = model.parent if model.is_file() and model.parent.parent == cache / "hub" else model
        if not inside or not place.exists():
            return
        with suppress(OSError):  # another user's cache, or a disk without locks: it works all the same
            self._fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with suppress(OSError):
            if place.is_dir():
                os.utime(place / RECORD)
            else:
                os.utime(place, (time.time(), place.stat().st_mtime))

    def close(self) -> None:
        """Not in use any more; may be called twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def read_record(place: Path) -> Record | None:
    """The record of a folder; None without one, or with one that cannot be read: the model is as good without."""
    try:
        return msgspec.json.decode((place / RECORD).read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def write_record(place: Path, record: Record) -> None:
    """At one stroke."""
    new = place / f"{RECORD}.new"
    new.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    new.replace(place / RECORD)


def _means(name: HubName, record: Record) -> bool:
    """Whether this record is of the model that the name asks for."""
    try:
        kept = hub_name(record.name)
    except LoadError:
        return False
    if kept.repo.lower() != name.repo.lower():
        return False
    if name.revision != kept.revision and not (name.revision and _is_commit(name.revision, record.commit)):
        return False
    if name.tag is None:
        return kept.tag is None
    return name.tag.upper() in ((record.tag or "").upper(), (kept.tag or "").upper())


def _is_commit(revision: str, commit: str) -> bool:
    return len(revision) >= 7 and commit.startswith(revision)


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(p for p in parent.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError:
        return []


def _holds_model(place: Path) -> bool:
    try:
        return (place / "config.json").is_file() or any(place.glob("*.gguf"))
    except OSError:  # a folder that this user may not look into
        return False


def _model_of(place: Path) -> Path:
    """What to serve of a folder: itself, or its one GGUF file (the first of a split one)."""
    with suppress(OSError):
        if (place / "config.json").is_file():
            return place
    ggufs = sorted(place.glob("*.gguf"))
    return ggufs[0] if ggufs else place


def _size(place: Path) -> int:
    total = 0
    for path in _inside(place):
        with suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _newest(place: Path) -> float:
    """When something in the folder last changed: just now, if it has gone meanwhile or cannot be looked at."""
    try:
        newest = place.stat().st_mtime
    except OSError:
        return time.time()
    for path in _inside(place):
        with suppress(OSError):
            newest = max(newest, path.stat().st_mtime)
    return newest


def _inside(place: Path) -> Iterator[Path]:
    """All under a folder, at any depth, while others may change it: what cannot be looked into is left out."""
    for folder, folders, files in os.walk(place):
        yield from (Path(folder, name) for name in (*folders, *files))


def _wait_for(lock: Path, what: str, say: Callable[[str], None]) -> int:
    """Wait until nobody else holds the lock file, and hold it."""
    said = False
    while True:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError:  # something was there, and was no folder when looked at
            if _in_the_way(lock.parent):
                raise
        try:
            return _take(lock)
        except FileNotFoundError:  # the folder went while we came
            continue
        except BlockingIOError:
            if not said:
                say(f"another process is fetching {what.replace('--', '/', 1)}; waiting for it")
            said = True
            time.sleep(_POLL_S)


def _in_the_way(folder: Path) -> bool:
    """Whether something else has the folder's name, which is not so when the folder itself came or went meanwhile."""
    try:
        return not S_ISDIR(folder.lstat().st_mode)
    except FileNotFoundError:
        return False


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Hold a lock file, or a model's own folder or file; raises `BlockingIOError` when somebody else holds it."""
    fd = _take(lock)
    try:
        yield
    finally:
        _give(lock, fd)


def _take(lock: Path) -> int:
    own = lock.name.endswith(LOCK)
    fd = os.open(lock, (os.O_RDWR | os.O_CREAT if own else os.O_RDONLY) | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise
    except OSError:  # a disk without locks: work goes on without
        return fd
    if own and not _same_file(fd, lock):  # whoever held it before has removed it
        os.close(fd)
        raise BlockingIOError(errno.EWOULDBLOCK, "the lock changed hands")
    return fd


def _give(lock: Path, fd: int) -> None:
    if lock.name.endswith(LOCK):
        lock.unlink(missing_ok=True)  # still ours: a file whose name goes is locked by nobody after us
    os.close(fd)


def _same_file(fd: int, path: Path) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    ours = os.fstat(fd)
    return (found.st_ino, found.st_dev) == (ours.st_ino, ours.st_dev)
