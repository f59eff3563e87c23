"""When an engine that has nothing to run looks whether its jobs have ended: reports come with the results of steps.

Promises: what ends is heard of after a tenth of the time that it took at the latest, and not before `POLL_S`; nobody
is woken more often than that needs.
Does not know: jobs, or a clock.
"""

from math import inf
from typing import Final

POLL_S: Final = 0.002
MOST_S: Final = 0.25
SHARE: Final = 0.1  # of the time since there was news


class Polls:
    """Owns: when there was news, and when to look next."""

    def __init__(self) -> None:
        self._since = -inf
        self.next = -inf

    def news(self, now: float) -> None:
        """Something began or ended."""
        self._since = now
        self.next = now + POLL_S

    def looked(self, now: float) -> None:
        """There was a look, at nothing new."""
        self.next = now + min(MOST_S, max(POLL_S, SHARE * (now - self._since)))

    def now(self, now: float) -> None:
        """There is something to look at already."""
        self.next = now
