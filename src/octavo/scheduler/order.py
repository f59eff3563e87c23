"""Who is next, and who gives way: one policy decides both.

Promises: waiting requests come in the policy's order; those looked at and skipped in a step come back in the next
without holding up those behind them (SCH-15); the victim is the last of those running.
Does not know: blocks, budgets, or why somebody was skipped.

A policy is a sort key, fixed when a request is first queued, and whether the running ones are served in key order
too. A preempted request keeps its key, so it stands before everybody who came later (SCH-30).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Protocol

from octavo.base.errors import ConfigError
from octavo.scheduler.request import Request
from octavo.scheduler.seams import Wait

_KEY = attrgetter("key")
_COMPACT = 512  # leave this many dead entries at the front before the list is cut


class Policy(Protocol):
    """What an order is made of."""

    name: str
    serves_by_key: bool  # running requests too are served in key order; else in order of admission

    def key(self, req: Request, number: int) -> tuple[float, ...]:
        """Sort key of a request, the least first; `number` counts arrivals and makes it unique."""


class Fcfs:
    """First come, first served; the one admitted last gives way first.

    Owns: nothing.
    """

    name = "fcfs"
    serves_by_key = False

    def key(self, req: Request, number: int) -> tuple[float, ...]:
        """The arrival's number."""
        return (number,)


class Priority:
    """The lowest priority value first, then the earlier arrival; the worst of the running gives way first.

    With `aging_s` > 0, waiting that long improves a priority by one. All who wait age alike, so comparing
    `priority - waited / aging_s` at any moment is comparing `priority + queued_at / aging_s`: a fixed key (SCH-40).

    Owns: nothing.
    """

    name = "priority"
    serves_by_key = True

    def __init__(self, aging_s: float, clock: Callable[[], float]) -> None:
        self._aging_s = aging_s
        self._clock = clock

    def key(self, req: Request, number: int) -> tuple[float, ...]:
        """Effective priority, then the arrival's number."""
        aged = self._clock() / self._aging_s if self._aging_s > 0 else 0.0
        return (req.source.priority + aged, number)


class Order:
    """The queues of requests that can run: waiting, skipped in the last step, held until something is over, and running.

    Owns: the queues and the arrival counter. Parked requests are in none of them.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._number = 0
        self._waiting: list[Request] = []  # by key; entries before _head are gone
        self._head = 0
        self._skipped: list[Request] = []
        self._held: dict[Wait, dict[Request, None]] = {}
        self._held_by: dict[Request, Wait] = {}
        self.running: list[Request] = []  # in the order they are served; change it through this class only

    @property
    def num_waiting(self) -> int:
        """Requests that wait, those skipped in the last step and those held included."""
        return len(self._waiting) - self._head + len(self._skipped) + len(self._held_by)

    def push(self, req: Request) -> None:
        """Queue a request: a new one, or one that comes back with the key it had."""
        if not req.key:
            self._number += 1
            req.rank(self._policy.key(req, self._number))
        if len(self._waiting) == self._head or self._waiting[-1].key < req.key:
            self._waiting.append(req)
        else:
            insort(self._waiting, req, lo=self._head, key=_KEY)

    def recall(self) -> None:
        """A new look at everybody: those skipped before stand in the queue again."""
        skipped, self._skipped = self._skipped, []
        for req in skipped:
            self.push(req)

    def peek(self) -> Request | None:
        """The next one waiting."""
        return self._waiting[self._head] if self._head < len(self._waiting) else None

    def release(self) -> None:
        """Those who were held for what is over stand in the queue again; it costs nothing for all the others."""
        for wait in [wait for wait in self._held if wait.over()]:
            for req in self._held.pop(wait):
                del self._held_by[req]
                self.push(req)

    def sift(self, count: int, wait_of: Callable[[Request], Wait | None]) -> Sequence[Request]:
        """The next `count` waiting who need not wait for anything; those passed on the way are held."""
        found: list[Request] = []
        at = self._head
        while at < len(self._waiting) and len(found) < count:
            req = self._waiting[at]
            at += 1
            if (wait := wait_of(req)) is None:
                found.append(req)
            else:
                self._hold(req, wait)
        self._waiting[at - len(found) : at] = found
        self._head = at - len(found)
        return found

    def hold(self, wait: Wait) -> None:
        """Take the next one out of the queue until `wait` is over."""
        self._hold(self.pop(), wait)

    def _hold(self, req: Request, wait: Wait) -> None:
        self._held.setdefault(wait, {})[req] = None
        self._held_by[req] = wait

    def waiting(self) -> Sequence[Request]:
        """Everybody waiting, best first; those skipped and those held last."""
        return [*self._waiting[self._head :], *self._skipped, *self._held_by]

    def skip(self) -> None:
        """Pass over the next one until `recall`."""
        self._skipped.append(self.pop())

    def pop(self) -> Request:
        """Take the next one out of the queue."""
        req = self._waiting[self._head]
        self._head += 1
        if self._head == len(self._waiting) or (self._head > _COMPACT and self._head * 2 > len(self._waiting)):
            del self._waiting[: self._head]
            self._head = 0
        return req

    def admit(self) -> None:
        """Move the next one to the running."""
        req = self.pop()
        if self._policy.serves_by_key:
            insort(self.running, req, key=_KEY)
        else:
            self.running.append(req)

    def remove(self, req: Request) -> None:
        """Take a request out of whichever queue it is in; nothing happens when it is in none."""
        if req.slot is not None:
            self.running.remove(req)
            return
        if (wait := self._held_by.pop(req, None)) is not None:
            del self._held[wait][req]
            if not self._held[wait]:
                del self._held[wait]
            return
        at = bisect_left(self._waiting, req.key, lo=self._head, key=_KEY)
        if at < len(self._waiting) and self._waiting[at] is req:
            del self._waiting[at]
        elif req in self._skipped:
            self._skipped.remove(req)

    def victim(self) -> Request:
        """Who gives way when there are no blocks left: the last of the running."""
        return self.running[-1]


def make_order(policy: str, *, aging_s: float = 0.0, clock: Callable[[], float]) -> Order:
    """The order called `policy`: "fcfs" or "priority"; raises `ConfigError` for others."""
    if policy == "fcfs":
        return Order(Fcfs())
    if policy == "priority":
        return Order(Priority(aging_s, clock))
    raise ConfigError(f"scheduling_policy {policy!r} is unknown; use 'fcfs' or 'priority'")
