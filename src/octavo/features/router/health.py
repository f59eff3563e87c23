"""Whether a server may be given requests.

Promises: a server that refuses connections, or says itself that it is not well, is down at once; one whose checks fail
is down after some in a row; all come back with one good check; one that says it is stopping is passed over and not called
down.
Does not know: how checks are made, or what a request is.

    UNKNOWN --good check--> UP --refused, says so, or failed checks in a row--> DOWN --good check--> UP
    any --says that it drains, for some seconds--> DRAINING --time over--> UP
"""

from collections.abc import Callable
from enum import StrEnum


class InstanceState(StrEnum):
    """What is known of a server."""

    UNKNOWN = "unknown"  # never checked
    UP = "up"
    DRAINING = "draining"
    DOWN = "down"


class InstanceHealth:
    """One server's state. `failures`: failed checks in a row until it is given up.

    Owns: the state, the count of failed checks, why it is down, and until when it drains.
    """

    def __init__(self, failures: int, clock: Callable[[], float]) -> None:
        self._failures = failures
        self._clock = clock
        self._state = InstanceState.UNKNOWN
        self._failed = 0
        self._drains_until_s = 0.0
        self.why = "it was not checked yet"

    @property
    def state(self) -> InstanceState:
        """The state now."""
        if self._state is InstanceState.UP and self._clock() < self._drains_until_s:
            return InstanceState.DRAINING
        return self._state

    @property
    def usable(self) -> bool:
        """True when it may be given requests."""
        return self.state is InstanceState.UP

    def passed(self) -> None:
        """A check was answered well. What it said about draining stands until its time is over."""
        self._state, self._failed, self.why = InstanceState.UP, 0, ""

    def failed(self, why: str, *, certain: bool = False) -> bool:
        """A check failed; `certain` when nobody was there, or the server itself said that it is not well.

        True when, with this one, so many failed in a row that what runs there is to be given up.
        """
        self._failed += 1
        if certain or self._failed >= self._failures:
            self._state, self.why = InstanceState.DOWN, why
        return self._failed == self._failures

    def refused(self, why: str) -> None:
        """A request found nobody there."""
        self._state, self.why = InstanceState.DOWN, why

    def drains(self, for_s: float) -> None:
        """It takes no requests now, and says for how long."""
        self._state, self._failed = InstanceState.UP, 0  # it is there, after all
        self._drains_until_s = self._clock() + for_s
        self.why = "it takes no requests now"
