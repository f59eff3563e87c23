"""A connection to another engine that was agreed with: hello, welcome, and whose clock says what (PDX-6).

Promises: the shake of hands ends within its time, with a connection, or with an error that says what differs.
Does not know: what is asked over it.
"""

import contextlib
import socket
import time

from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.wire import VERSION, Hello, Welcome, receive, send


class Connection:
    """Owns: the socket."""

    def __init__(self, host: str, port: int, seal: Seal, timeout_s: float) -> None:
        """`timeout_s`: for the shake of hands, and later for the other side to give or take anything at all.

        Raises `OSError`, or `WireError` with the reason of a refusal.
        """
        self.socket = socket.create_connection((host, port), timeout=timeout_s)
        try:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            asked = time.time()
            send(self.socket, Hello(version=VERSION, identity=seal.identity))
            welcome = receive(self.socket, Welcome, time.monotonic() + timeout_s)
        except BaseException:
            self.socket.close()
            raise
        self.clock_offset_s = welcome.now - (asked + time.time()) / 2  # their clock less ours, to half a round trip

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self.socket.close()
