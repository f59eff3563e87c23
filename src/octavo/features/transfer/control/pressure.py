"""How much of what could be written to a tier is written: back-pressure (TIR-17).

Promises: a tier that takes longer for a byte than it may gets less, in proportion to by how much; it gets all again
only when it is well below that; counters say what was left out.
Does not know: keys, tiers or clocks.
"""

from octavo.features.transfer.control.speed import Average

LEAST_BYTES = 1 << 20  # a smaller store counts as one of this size: it says more of calls than of bytes


class Pressure:
    """An exponential average of seconds a byte, between two marks.

    Above `high` only `high / average` of the stores go, spread evenly; below `low` all go again.

    Owns: the average, whether stores are thinned, what of the next store is already earned, and the counters.
    """

    def __init__(self, high: float, low: float | None = None) -> None:
        """Seconds a byte; `low` is half of `high` unless given. Raises `ValueError` for marks that are no range."""
        self._high = high
        self._low = high / 2 if low is None else low
        if not 0 < self._low <= self._high:
            raise ValueError(f"the low mark must be above 0 and not above the high one, got {self._low} and {high}")
        self._average = Average()
        self._earned = 0.0
        self.thinned = False
        self.num_dropped = 0

    @property
    def average(self) -> float:
        """Seconds a byte; 0 before anything was measured."""
        return self._average.value or 0.0

    def measured(self, num_bytes: int, seconds: float) -> None:
        """A store of so many bytes took so long. A failed one counts as long as it took."""
        if num_bytes <= 0 or seconds < 0:
            return
        average = self._average.take(seconds / max(num_bytes, LEAST_BYTES))
        if average > self._high:
            self.thinned = True
        elif average < self._low:
            self.thinned = False
            self._earned = 0.0

    def admits(self) -> bool:
        """May one more store go?"""
        if self.thinned and self.average:
            self._earned += min(1.0, self._high / self.average)
            if self._earned < 1.0:
                self.num_dropped += 1
                return False
            self._earned -= 1.0
        return True

    def reset(self) -> None:
        """Forget what was measured; counters stay."""
        self._average = Average()
        self._earned = 0.0
        self.thinned = False
