"""Whether an engine gets on: what it says of itself now and then, and what the front makes of it (EXE-3, OPS-11).

Promises: an engine that rests is well, as is one whose steps end or compute; one that says nothing (frozen, gone), or
works and gets nowhere (a step that hangs), is late after `LATE_S`. How long a step takes does not matter while it
computes. Time in which the front itself did not run (stopped and continued, a machine that slept) is not held against
the engine.
Does not know: sockets, threads, or what follows from lateness. docs/adr has the reasons.
"""

import time
from collections.abc import Callable

import msgspec

HEARTBEAT_S = 0.5  # between two beats of an engine's process, and two looks of the front
LATE_S = 1.5  # of silence: with one look more, within 2 s of the first beat that did not come
LONGEST_LOOK_S = 2 * HEARTBEAT_S  # a longer gap between two looks was the front's own absence
COMPUTES = 0.05  # share of a core: a thread that only waits in small portions takes far less
STEPS_OF = 10  # a step that computes may take this many times what one that does not may


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """How far an engine is at one moment."""

    at_s: float  # monotonic, on the engine's machine
    resting: bool  # nothing to do
    progress: int = 0  # messages and steps handled; it only grows
    cpu_s: float = 0.0  # processor time of the threads that a step needs
    healthy: bool = True  # False: its worker is gone


class Pulse:
    """What the front has felt so far. Whoever owns it calls `feel` about every `HEARTBEAT_S`.

    `silent_s`: since anything was heard. `still_s`: since the engine rested, went on or computed. `stuck_s`: since it
    rested or went on.

    Owns: the last beat and these times.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_s = clock()
        self._last: Heartbeat | None = None
        self.silent_s = self.still_s = self.stuck_s = 0.0

    @property
    def late(self) -> bool:
        """True when something is wrong, or was a moment ago."""
        return self.still_s >= LATE_S or not (self._last is None or self._last.healthy)

    def over(self, limit_s: float) -> str | None:
        """Why the engine is to be given up, if it is: `limit_s` seconds without a sign of life, or ten times that in one
        step; None while there is hope."""
        if self._last is not None and not self._last.healthy:
            return "the engine's worker is gone"
        if not limit_s:
            return None
        if self.still_s >= limit_s:
            what = "has said nothing" if self.silent_s >= limit_s else "has got nowhere with its work"
            return f"the engine {what} for {limit_s:g} s (--hang-timeout-s)"
        if self.stuck_s >= STEPS_OF * limit_s:
            return (
                f"a step of the engine has not ended for {STEPS_OF * limit_s:g} s ({STEPS_OF} times --hang-timeout-s)"
            )
        return None

    def feel(self, heartbeat: Heartbeat | None) -> None:
        """The latest beat that came; None when none did yet, which says nothing (an engine that has no beats)."""
        now_s = self._clock()
        passed_s = min(now_s - self._looked_s, LONGEST_LOOK_S)
        self._looked_s = now_s
        if heartbeat is None:
            return
        last, self._last = self._last, heartbeat
        self.silent_s += passed_s
        self.still_s += passed_s
        self.stuck_s += passed_s
        if last is not None and heartbeat.at_s == last.at_s:
            return
        self.silent_s = 0.0
        if last is None or heartbeat.resting or heartbeat.progress != last.progress:
            self.still_s = self.stuck_s = 0.0
        elif heartbeat.cpu_s - last.cpu_s >= COMPUTES * (heartbeat.at_s - last.at_s):
            self.still_s = 0.0
