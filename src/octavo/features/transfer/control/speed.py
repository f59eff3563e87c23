"""How fast something is, from what was seen of it.

Promises: the newest measurements count most; what is too small to say anything says nothing.
Does not know: what is measured, or a clock.
"""

SMOOTHING = 0.2  # weight of the newest measurement


class Speed:
    """Units a second.

    Owns: the average.
    """

    def __init__(self, least: float) -> None:
        """Measurements of fewer than `least` units are left out."""
        self._least = least
        self._average = 0.0

    @property
    def per_s(self) -> float:
        """Units a second; 0 while nothing is known."""
        return self._average

    def seen(self, units: float, seconds: float) -> None:
        """So many units took so long."""
        if units < self._least or seconds <= 0:
            return
        value = units / seconds
        self._average += (SMOOTHING if self._average else 1.0) * (value - self._average)

    def seconds(self, units: float) -> float:
        """How long so many units will take; 0 while nothing is known."""
        return units / self._average if self._average else 0.0
