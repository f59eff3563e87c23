"""Blocks that another engine may still read: until when, and what ends it (PDX-8, PDX-9).

Promises: a lease ends once, by being done, by being given up or by silence; a heartbeat moves its end forward only,
whatever order heartbeats come in; while a reader may be at work the blocks are not given up, also past the end.
Does not know: blocks, sockets, or the clock (it is injected).

The producer grants; the consumer's heartbeats renew; `expire` ends what nobody renewed. A reader that has said that it
begins, and not that it ended, is *fenced*: its lease's blocks stay until the transport says that nothing reads any more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

LEASE_S: Final = 30.0
RENEWAL: Final = 2 / 3  # of a lease, from the moment of the heartbeat


class LeaseEnd(StrEnum):
    """Why a lease is over."""

    DONE = "done"  # the consumer has everything
    ABORTED = "aborted"  # one of the two sides gave up
    EXPIRED = "expired"  # nobody renewed it


@dataclass(slots=True)
class _Lease:
    """Owns: its end, and the readers at work."""

    consumer: str
    until: float
    readers: set[str]
    over: LeaseEnd | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A lease whose blocks may go."""

    lease_id: str
    why: LeaseEnd


class LeaseTable:
    """The producer's leases.

    Owns: every lease that was granted and not yet ended, and counters.
    """

    def __init__(self, clock: Callable[[], float], *, lease_s: float = LEASE_S) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._leases: dict[str, _Lease] = {}
        self.counts: dict[LeaseEnd, int] = dict.fromkeys(LeaseEnd, 0)
        self.num_ignored = 0  # notices about leases that are not there, or were said before

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._leases

    def grant(self, lease_id: str, consumer: str = "") -> float:
        """A new lease; when it ends if nobody renews it. Raises `ValueError` for an id that is in use."""
        if lease_id in self._leases:
            raise ValueError(f"lease {lease_id!r} was granted already")
        until = self._clock() + self._lease_s
        self._leases[lease_id] = _Lease(consumer, until, set())
        return until

    def renew(self, lease_id: str) -> bool:
        """A heartbeat. False: there is no such lease any more, and the reader must stop."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.over is not None:
            self.num_ignored += 1
            return False
        lease.until = max(lease.until, self._clock() + RENEWAL * self._lease_s)
        return True

    def begin_read(self, lease_id: str, reader: str) -> bool:
        """A reader is about to touch the blocks. False: it must not."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.over is not None:
            self.num_ignored += 1
            return False
        lease.readers.add(reader)
        return True

    def end_read(self, lease_id: str, reader: str) -> tuple[Ended, ...]:
        """The transport says that this reader touches nothing any more. What may go now."""
        lease = self._leases.get(lease_id)
        if lease is None or reader not in lease.readers:
            self.num_ignored += 1
            return ()
        lease.readers.remove(reader)
        return self._settle(lease_id, lease)

    def end(self, lease_id: str, why: LeaseEnd) -> tuple[Ended, ...]:
        """Somebody says that the lease is over. What may go now: nothing while a reader is at work."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.over is not None:
            self.num_ignored += 1
            return ()
        lease.over = why
        return self._settle(lease_id, lease)

    def expire(self) -> tuple[Ended, ...]:
        """End what nobody renewed. All leases are looked at: heartbeats make their order useless."""
        now = self._clock()
        late = [i for i, lease in self._leases.items() if lease.over is None and lease.until <= now]
        return tuple(ended for lease_id in late for ended in self.end(lease_id, LeaseEnd.EXPIRED))

    def _settle(self, lease_id: str, lease: _Lease) -> tuple[Ended, ...]:
        if lease.over is None or lease.readers:
            return ()
        del self._leases[lease_id]
        self.counts[lease.over] += 1
        return (Ended(lease_id, lease.over),)

    def next_deadline(self) -> float | None:
        """When `expire` may find something; None: never."""
        return min((lease.until for lease in self._leases.values() if lease.over is None), default=None)

    def fenced(self) -> tuple[str, ...]:
        """Leases that are over and still being read."""
        return tuple(lease_id for lease_id, lease in self._leases.items() if lease.over is not None)
