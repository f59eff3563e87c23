"""Which leases may be read right now, and who is reading: the fence of the producer's side (PDX-8, PDX-9).

Promises: a block is copied out only while its lease is open; once `close` was called and the last reader has gone, a
lease is reported closed, once, and nothing of it is touched any more.
Does not know: until when a lease runs, or sockets.

The engine's thread opens and closes; threads of connections read. An answer that offers a lease may reach its consumer
before the lease is open here: what asks for a lease that was never seen waits a moment for it.
"""

import contextlib
import queue
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from octavo.features.transfer.handover import LeaseEvent, LeaseNews

PATIENCE_S: Final = 1.0  # for a lease that was never seen
MOST_CLOSED: Final = 10_000  # leases that are remembered

Tables = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class _Open:
    """Owns: how many read, and whether it is to close."""

    blocks: Tables
    readers: int = 0
    closing: bool = False


class LeaseGuard:
    """Owns: the open leases, which were closed lately, and notices that wait for the next report."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._lock = threading.Condition()
        self._open: dict[str, _Open] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._events: queue.SimpleQueue[LeaseEvent] = queue.SimpleQueue()

    def open(self, lease: str, blocks: Tables) -> None:
        """These blocks may be read from now on."""
        with self._lock:
            self._open[lease] = _Open(blocks)
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

    def _standing(self, lease: str) -> _Open | None:
        """The lease, if it is open or becomes so at once; the lock is held."""
        if lease not in self._open and lease not in self._closed:
            self._lock.wait_for(lambda: lease in self._open, self._patience_s)
        found = self._open.get(lease)
        return None if found is None or found.closing else found

    def _forget(self, lease: str) -> None:
        del self._open[lease]
        self._closed[lease] = None
        if len(self._closed) > MOST_CLOSED:
            self._closed.popitem(last=False)

    def tell(self, lease: str, news: LeaseNews) -> bool:
        """A notice of a consumer; False when there is no such lease (any more)."""
        with self._lock:
            alive = self._standing(lease) is not None
        if alive:
            self._events.put(LeaseEvent(lease, news))
        return alive

    def news(self) -> tuple[LeaseEvent, ...]:
        """Notices since the last call, in order."""
        out = []
        while True:
            try:
                out.append(self._events.get_nowait())
            except queue.Empty:
                return tuple(out)

    def stop(self) -> None:
        """Nothing is left to be told to anybody."""
