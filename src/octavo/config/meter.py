"""How far a pull is, in lines for people.

Promises: sizes are decimal, as disks and hubs count; a disk too small is said before the first byte.
Does not know: who fetches, or whether anybody reads the lines.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from octavo.base.errors import LoadError

SPARE_BYTES: Final = 64 << 20  # left on the disk beside what is fetched
TELL_S: Final = 0.2  # between two lines of progress
SETTLED_S: Final = 2.0  # after which the speed says something about the time left

Progress = Callable[[str], None]


class Passing(str):
    """A line of progress that counts only until the next one."""

    __slots__ = ()


class Meter:
    """Tells how far a pull is. `sizes` are the files' bytes (None: not known), `here` what an earlier pull left.

    Owns: what has come of each file, and when it last told.
    """

    def __init__(
        self,
        name: str,
        sizes: Mapping[str, int | None],
        here: Mapping[str, int],
        progress: Progress,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._progress = progress
        self._clock = clock
        self._have = dict(here)
        self._start = self._reported_s = clock()
        self._first = sum(here.values())
        self._total = sum(size or 0 for size in sizes.values())
        goes_on = f", {size_text(self._first)} of it here already" if self._first else ""
        files = "1 file" if len(sizes) == 1 else f"{len(sizes)} files"
        progress(f"fetching {name}: {files}, {size_text(self._total)}{goes_on}")

    def check_room(self, cache: Path) -> None:
        """Raise `LoadError` when the disk cannot take what is missing."""
        missing, free = self._total - self._first, shutil.disk_usage(cache).free
        if missing + SPARE_BYTES > free:
            raise LoadError(
                f"{self._name} needs {size_text(missing)} more, and the disk of {cache} has {size_text(free)} left; "
                "make room, or set OCTAVO_CACHE to a folder on another disk"
            )

    def of(self, file: str) -> Callable[[int], None]:
        """What to call with the bytes that one file has."""

        def report(num_bytes: int) -> None:
            self._have[file] = num_bytes
            now = self._clock()
            if now - self._reported_s >= TELL_S:
                self._reported_s = now
                self._progress(Passing(self._line(now)))

        return report

    def end(self) -> None:
        """The last word."""
        self._progress(self._line(self._clock()))

    def _line(self, now: float) -> str:
        have = sum(self._have.values())
        speed = (have - self._first) / max(now - self._start, 1e-3)
        share = f" of {size_text(self._total)} ({100 * have // self._total} %)" if self._total else ""
        known = have < self._total and speed > 0 and now - self._start > SETTLED_S
        rest = f", {time_text((self._total - have) / speed)} left" if known else ""
        return f"{self._name}: {size_text(have)}{share}, {size_text(int(speed))}/s{rest}"


def time_text(seconds: float) -> str:
    """A time that is still to come, roughly."""
    minutes, rest = divmod(int(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def size_text(num_bytes: int) -> str:
    """Bytes in the largest unit that they fill."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} bytes"
