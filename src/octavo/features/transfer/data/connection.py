"""A connection to another engine that was agreed with: hello, welcome, and whose clock says what (PDX-6).

Promises: the shake of hands ends within its time, with a connection, or with an error that says what differs.
Does not know: what is asked over it.
"""

import contextlib
import socket
import time

from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.data.timed import TimedSocket
from octavo.features.transfer.wire import VERSION, Hello, Welcome, receive, send


class TimedConnection:
    """Owns: the socket, whose calls end by the moment that `within` set last."""

    def __init__(self, host: str, port: int, seal: Seal, timeout_s: float) -> None:
        """`timeout_s`: for the shake of hands as a whole.

        Raises `OSError`, or `WireError` with the reason of a refusal.
        """
        began = time.monotonic()
        self.socket = TimedSocket.of(socket.create_connection((host, port), timeout=timeout_s))
        try:
            self.socket.settimeout(None)
            self.socket.within(began + timeout_s - time.monotonic())
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            asked = time.time()
            send(self.socket, Hello(version=VERSION, identity=seal.identity))
            welcome = receive(self.socket, Welcome)
        except BaseException:
            self.socket.close()
            raise
        self.clock_offset_s = welcome.now - (asked + time.time()) / 2  # their clock less ours, to half a round trip

    def within(self, seconds: float) -> None:
        """All that is said and heard from now on takes so long at most, together; then `TimeoutError` is raised."""
        self.socket.within(seconds)

    @property
    def has_time(self) -> bool:
        """The moment that `within` set is not there yet."""
        return self.socket.deadline.is_ahead

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self.socket.close()
