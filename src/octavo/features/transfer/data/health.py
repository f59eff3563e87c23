"""Whether a tier is asked at present, and what the log hears of it: one line, then a count (TIR-31).

Promises: after a call that failed a tier is left alone for a while, whichever of its threads made the call; however
often it fails, the log has one line for it, and then one now and then that says how often since; that it works again is
said, too.
Does not know: any tier.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

REST_S: Final = 5.0  # without a call, after one that failed
QUIET_S: Final = 60.0  # after a line, before there is another of its kind


class TierHealth:
    """One tier's, or another's that works beside the steps, shared by the threads that work for it.

    `name` begins its lines in the log.

    Owns: until when the tier is left alone, how often it failed since it worked, and what was said when.
    """

    def __init__(self, name: str, rest_s: float = REST_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._rest_s = rest_s
        self.clock = clock
        self._lock = threading.Lock()
        self._rests_until = float("-inf")
        self._failures = 0  # since it worked last
        self._said: dict[str, tuple[float, int]] = {}  # by kind of line: when, and how many were not said since

    @property
    def rests(self) -> bool:
        """The tier is not to be called now."""
        return self.clock() < self._rests_until

    def failed(self, error: object) -> None:
        """A call failed: the tier is left alone for a while."""
        with self._lock:
            self._rests_until = self.clock() + self._rest_s
            self._failures += 1
        self.note("failed", f"it is left alone for {self._rest_s:g} s at a time: {error}")

    def worked(self) -> None:
        """A call did what it should."""
        if not self._failures:
            return
        with self._lock:
            failures, self._failures = self._failures, 0
        self.note("works", f"works again, after {failures} {'failures' if failures > 1 else 'failure'}")

    def note(self, kind: str, text: str) -> None:
        """A line for the log, unless there was one of this kind a while ago; then it is counted."""
        with self._lock:
            now = self.clock()
            when, unsaid = self._said.get(kind, (float("-inf"), 0))
            if now - when < QUIET_S:
                self._said[kind] = (when, unsaid + 1)
                return
            self._said[kind] = (now, 0)
        log.warning("%s: %s%s", self._name, text, f" ({unsaid} more since the last line)" if unsaid else "")
