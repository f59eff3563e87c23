"""Which leases may be read right now, and who is reading: the fence of the producer's side (PDX-8, PDX-9).

Promises: a block is copied out only while its lease is open; once `close` was called and the last reader has gone, a
lease is reported closed, once, and nothing of it is touched any more.
Does not know: until when a lease runs, or sockets.

The engine's thread opens and closes; threads of connections read. An answer that offers a lease may reach its consumer
before the lease is open here, by a step: what asks for a lease that was never seen waits for it, once.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from octavo.features.transfer.data.worker_thread import Outbox
from octavo.features.transfer.disagg import LeaseEvent, LeaseNews

PATIENCE_S: Final = 3.0  # for leases that were never seen: a step may take long, and a consumer waits for `TIMEOUT_S`
MOST_PAST: Final = 10_000  # leases that are remembered

Tables = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class _Open:
    """Owns: how many read, and whether it is to close."""

    blocks: Tables
    readers: int = 0
    closing: bool = False


class LeaseGuard:
    """Owns: the open leases, those that nobody need wait for, and notices that wait for the next report."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._lock = threading.Condition()
        self._open: dict[str, _Open] = {}
        self._past: OrderedDict[str, None] = OrderedDict()  # closed, or waited for in vain
        self._events: Outbox[LeaseEvent] = Outbox()

    def open(self, lease: str, blocks: Tables) -> None:
        """These blocks may be read from now on."""
        with self._lock:
            self._open[lease] = _Open(blocks)
            self._past.pop(lease, None)
            self._lock.notify_all()

    def close(self, lease: str) -> None:
        """Nobody may begin to read; it is reported closed when nobody reads any more, or was never open."""
        with self._lock:
            found = self._open.get(lease)
            if found is not None:
                found.closing = True
                if found.readers:
                    return
                self._forget(lease)
        self._events.put(LeaseEvent(lease, LeaseNews.CLOSED))

    @contextlib.contextmanager
    def reading(self, lease: str) -> Iterator[Tables | None]:
        """The lease's blocks, which stay as they are until the end of the `with`; None: hands off."""
        with self._lock:
            self._wait_for((lease,))
            found = self._standing(lease)
            if found is not None:
                found.readers += 1
        try:
            yield None if found is None else found.blocks
        finally:
            if found is not None:
                self._leave(lease, found)

    def _leave(self, lease: str, found: _Open) -> None:
        with self._lock:
            found.readers -= 1
            if found.readers or not found.closing:
                return
            self._forget(lease)
        self._events.put(LeaseEvent(lease, LeaseNews.CLOSED))

    def _wait_for(self, leases: Sequence[str]) -> None:
        """Wait until all of these have been seen, once for all of them together; the lock is held."""

        def strange() -> list[str]:
            return [lease for lease in leases if lease not in self._open and lease not in self._past]

        if strange():
            self._lock.wait_for(lambda: not strange(), self._patience_s)
            for lease in strange():
                self._remember(lease)

    def _standing(self, lease: str) -> _Open | None:
        """The lease, if it is open; the lock is held."""
        found = self._open.get(lease)
        return None if found is None or found.closing else found

    def _forget(self, lease: str) -> None:
        del self._open[lease]
        self._remember(lease)

    def _remember(self, lease: str) -> None:
        self._past[lease] = None
        if len(self._past) > MOST_PAST:
            self._past.popitem(last=False)

    def tell(self, leases: Sequence[str], news: LeaseNews) -> tuple[bool, ...]:
        """A consumer's notice of each of these; False for those that are not there (any more)."""
        with self._lock:
            self._wait_for(leases)
            alive = tuple(self._standing(lease) is not None for lease in leases)
        for lease, stands in zip(leases, alive, strict=True):
            if stands:
                self._events.put(LeaseEvent(lease, news))
        return alive

    def news(self) -> tuple[LeaseEvent, ...]:
        """Notices since the last call, in order."""
        return self._events.take()

    def stop(self) -> None:
        """Nothing is left to be told to anybody."""
