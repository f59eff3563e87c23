"""When a request passed its stations.

Promises: moments of one clock, taken out as a message.
Does not know: the clock, or who asks.
"""

from octavo.base.outputs import RequestTimes


class Timeline:
    """Moments of one request on the engine's monotonic clock, in seconds; 0 means 'not yet' (REQ-6).

    Owns: its fields; each is written once, but `preempted_s` grows. Its request writes them.
    """

    __slots__ = ("arrived_s", "finished_s", "first_token_s", "preempted_s", "queued_s", "scheduled_s")

    def __init__(self, arrived_s: float, queued_s: float) -> None:
        self.arrived_s = arrived_s
        self.queued_s = queued_s
        self.scheduled_s = 0.0
        self.first_token_s = 0.0
        self.finished_s = 0.0
        self.preempted_s: list[float] = []

    def snapshot(self) -> RequestTimes:
        """The moments as a message."""
        return RequestTimes(self.arrived_s, self.queued_s, self.scheduled_s, self.first_token_s, self.finished_s)
