"""What a start is doing now, and how long each part of it took.

Promises: one phase at any moment, so the phases together are the whole time from the beginning; any thread may enter
the next one or ask.
Does not know: what the phases are, or who shows them.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

Enter = Callable[[str], None]  # takes the name of the phase that begins now
LONGEST_INTERPRETER_S: Final = 60.0  # a process older than this at its first line had another life before


@dataclass(frozen=True, slots=True)
class Now:
    """Where a start stands: the phase, and the seconds in it and in all."""

    phase: str
    seconds: float
    total_s: float


class Phases:
    """The phases of one start. `began_s`: when the first began, by `clock`; `tell` hears of each one that is entered.

    Owns: the seconds of those that are over, and which one it is now.
    """

    def __init__(
        self,
        first: str,
        began_s: float | None = None,
        *,
        tell: Enter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._tell = tell
        self.began_s = clock() if began_s is None else began_s
        self._lock = threading.Lock()
        self._name, self._since_s = first, self.began_s
        self._over: dict[str, float] = {}

    def enter(self, name: str) -> None:
        """The phase `name` begins, and the one before is over."""
        with self._lock:
            now_s = self._clock()
            self._over[self._name] = self._over.get(self._name, 0.0) + now_s - self._since_s
            self._name, self._since_s = name, now_s
        if self._tell is not None:
            self._tell(name)

    def now(self) -> Now:
        """Where the start stands."""
        with self._lock:
            now_s = self._clock()
            return Now(self._name, now_s - self._since_s, now_s - self.began_s)

    def seconds(self) -> Mapping[str, float]:
        """Seconds of each phase in the order of their beginnings, the one now included."""
        with self._lock:
            so_far_s = self._over.get(self._name, 0.0) + self._clock() - self._since_s
            return {**self._over, self._name: so_far_s}


def process_began_s(stat: Path = Path("/proc/self/stat")) -> float:
    """When this process began, on the clock of `time.monotonic`: now, where the system does not say, or where the process
    is so old that it must have done other things before."""
    now_s = time.monotonic()
    try:
        ticks = int(stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux, or a /proc that hides it
        return now_s
    return now_s - age_s if 0.0 <= age_s <= LONGEST_INTERPRETER_S else now_s
