"""Which weights are the same, by what is in their files.

Promises: two checkpoints with the same weight files have the same digest, wherever they lie and whatever their times;
one that was changed in any bit has another. Files are read once: what was found is kept beside the packed weights, and
holds as long as a file's path, size and time of change are the same.
Does not know: tensors, or what the digest is for.

A file's digest is the SHA-256 of the SHA-256 of each of its sections, so that one large file keeps all cores at work.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Final

from octavo.base.errors import LoadError

SECTION_BYTES: Final = 64 << 20
PIECE_BYTES: Final = 4 << 20  # read at a time
ENDING: Final = ".sums"
SAID_FROM_S: Final = 1.0  # a reading that took as long is mentioned

Found = tuple[int, int, str]  # bytes, time of change in nanoseconds, digest


def weight_files(source: Path) -> list[Path]:
    """The files of a checkpoint that hold weights: those of a folder, or a GGUF file with the rest of its split."""
    if source.is_dir():
        return sorted(source.glob("*.safetensors")) or sorted(source.glob("*.gguf"))
    split = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", source.name)
    return [source] if split is None else sorted(source.parent.glob(f"{escape(split[1])}-*-of-{split[2]}.gguf"))


def contents(
    source: Path,
    *,
    kept: Path | None,
    num_threads: int,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """The digest of a checkpoint's weights: 64 hexadecimal digits.

    `kept` is the folder where digests of files are kept; None: they are computed each time. Raises `LoadError` for a
    file that cannot be read.
    """
    files, began = weight_files(source), clock()
    book = (
        None if kept is None else kept / f"{hashlib.sha256(str(source.absolute()).encode()).hexdigest()[:32]}{ENDING}"
    )
    known, found = _read(book), dict[str, Found]()
    num_bytes = 0
    try:
        for path in files:
            state = path.stat()
            before = known.get(path.name)
            if before is not None and before[:2] == (state.st_size, state.st_mtime_ns):
                found[path.name] = before
            else:
                num_bytes += state.st_size
                found[path.name] = (state.st_size, state.st_mtime_ns, _digest(path, state.st_size, num_threads))
    except OSError as error:
        raise LoadError(f"{error.filename or source} cannot be read: {error.strerror}") from None
    if num_bytes:
        _write(book, found)
    took = clock() - began
    if took >= SAID_FROM_S:
        again = "is not kept (--weight-cache off)" if kept is None else "is kept for the next start"
        say(f"weights: a checksum of {num_bytes / 2**30:.2f} GiB, by which KV is known, took {took:.1f} s and {again}")
    return hashlib.sha256("".join(sorted(digest for _, _, digest in found.values())).encode()).hexdigest()


def _digest(path: Path, size: int, num_threads: int) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with ThreadPoolExecutor(num_threads) as pool:
            sections: Sequence[bytes] = list(pool.map(lambda at: _section(fd, at), range(0, size, SECTION_BYTES)))
    finally:
        os.close(fd)
    return hashlib.sha256(b"".join(sections)).hexdigest()


def _section(fd: int, start: int) -> bytes:
    digest, at = hashlib.sha256(), start
    while at < start + SECTION_BYTES:
        piece = os.pread(fd, min(PIECE_BYTES, start + SECTION_BYTES - at), at)
        if not piece:
            break
        digest.update(piece)
        at += len(piece)
    return digest.digest()


def _read(book: Path | None) -> dict[str, Found]:
    """What was kept; nothing when it is not there or not to be understood."""
    if book is not None:
        with suppress(OSError, ValueError, TypeError, AttributeError):
            return {name: (size, mtime, digest) for name, (size, mtime, digest) in json.loads(book.read_text()).items()}
    return {}


def _write(book: Path | None, found: dict[str, Found]) -> None:
    """At one stroke; a folder that cannot be written to costs the next start the same time again."""
    if book is None:
        return
    part = book.with_suffix(f".{os.getpid()}.part")
    with suppress(OSError):
        book.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(found))
        part.replace(book)
