"""Who is being served, and the end of admission when the server stops (OPS-10).

Promises: after `stop` nothing new is let in; `drained` tells when all work has ended; `cut` ends the
rest with an error each client can read.
Does not know: signals, exit codes, or what the work is.
"""

import asyncio

from octavo.base.errors import OctavoError
from octavo.http.errors import ServerStopping


class Ticket:
    """One request's place inside the gate.

    Owns: the future that ends the request early; it carries the error to tell.
    """

    __slots__ = ("cut",)

    def __init__(self) -> None:
        self.cut: asyncio.Future[OctavoError] = asyncio.get_running_loop().create_future()


class Gate:
    """Lets generation requests in and out; used from the event loop only.

    Owns: the open tickets and whether admission is closed.
    """

    def __init__(self) -> None:
        self._open: set[Ticket] = set()
        self._stopping = False
        self._stopped = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def stopping(self) -> bool:
        """True once `stop` was called: new requests get 503 and readiness is red."""
        return self._stopping

    @property
    def num_active(self) -> int:
        """Generation requests being served now, queued ones included."""
        return len(self._open)

    def enter(self) -> Ticket:
        """Admit one request; raises `ServerStopping` after `stop`."""
        if self._stopping:
            raise ServerStopping
        ticket = Ticket()
        self._open.add(ticket)
        self._empty.clear()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """The request has ended; calling it twice is harmless."""
        self._open.discard(ticket)
        if not self._open:
            self._empty.set()

    def stop(self) -> None:
        """Admit nothing more; what runs goes on."""
        self._stopping = True
        self._stopped.set()

    async def stopped(self) -> None:
        """Wait for `stop`; for what must end with admission, such as streams that never end by themselves."""
        await self._stopped.wait()

    async def drained(self, timeout_s: float) -> bool:
        """Wait until nothing runs; False when the time ran out first."""
        if not self._open:
            return True
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def cut(self, error: OctavoError | None = None) -> int:
        """End everything that still runs: streams get an error event, plain requests a 503. Returns how many."""
        error = error or ServerStopping("the server is stopping and its time to finish requests is over")
        for ticket in self._open:
            if not ticket.cut.done():
                ticket.cut.set_result(error)
        return len(self._open)
