"""Whether a tier is worth turning to, from how it did last (TIR-17).

Promises: one that failed several times in a row, or kept silent once, is left alone, first for a second, then for
twice as long each time, up to a minute; it is tried once in between, and one success makes it as good as any. Only
such a try makes the time longer: of what was under way when it began to fail, all fails, and says nothing new.
Does not know: what was asked of it, or a clock.
"""

from math import inf
from typing import Final

TOLERATED: Final = 3  # failures in a row
FIRST_S: Final = 1.0
MOST_S: Final = 60.0


class Standing:
    """Owns: failures in a row, for how long the tier is left alone, until when, and whether it is being tried."""

    def __init__(self) -> None:
        self._failures = 0
        self._rest_s = 0.0
        self._until = -inf
        self._tried = False

    @property
    def trusted(self) -> bool:
        """Worth waiting for."""
        return self._failures < TOLERATED

    @property
    def on_trial(self) -> bool:
        """Not trusted, and nothing is known yet of what it was last tried with."""
        return self._tried

    def may_try(self, now: float) -> bool:
        """May something be asked of it now? Says yes once for each time that it is left alone."""
        if self.trusted:
            return True
        if now < self._until:
            return False
        self._until = now + self._rest_s
        self._tried = True
        return True

    def good(self) -> None:
        """It did what it was asked."""
        self._failures, self._rest_s, self._until, self._tried = 0, 0.0, -inf, False

    def bad(self, now: float, *, silent: bool = False) -> None:
        """It failed, or, `silent`, did not answer in time: that counts at once."""
        news = self.trusted or self._tried
        self._failures += TOLERATED if silent else 1
        if news and not self.trusted:
            self._rest_s = min(MOST_S, max(FIRST_S, 2 * self._rest_s))
            self._until, self._tried = now + self._rest_s, False
