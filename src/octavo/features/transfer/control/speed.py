"""How fast something is, from what was seen of it.

Promises: the newest measurements count most; what is too small to say anything says nothing.
Does not know: what is measured, or a clock.
"""

SMOOTHING = 0.2  # weight of the newest measurement


class Average:
    """An exponential average; its first value counts whole.

    Owns: the value, None before there is one.
    """

    def __init__(self) -> None:
        self.value: float | None = None

    def take(self, value: float) -> float:
        """One more value; the average with it."""
        self.value = value if self.value is None else self.value + SMOOTHING * (value - self.value)
        return self.value


class Speed:
    """Units a second.

    Owns: the average.
    """

    def __init__(self, least: float) -> None:
        """Measurements of fewer than `least` units are left out."""
        self._least = least
        self._average = Average()

    @property
    def per_s(self) -> float:
        """Units a second; 0 while nothing is known."""
        return self._average.value or 0.0

    def begin(self, per_s: float) -> None:
        """What was measured before anybody came; 0: nothing was."""
        if per_s > 0:
            self._average.value = per_s

    def seen(self, units: float, seconds: float) -> None:
        """So many units took so long."""
        if units < self._least or seconds <= 0:
            return
        self._average.take(units / seconds)

    def seconds(self, units: float) -> float:
        """How long so many units will take; 0 while nothing is known."""
        return units / self.per_s if self.per_s else 0.0
