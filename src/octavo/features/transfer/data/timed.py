"""Sockets whose calls all end by one moment, however little at a time comes or goes.

Promises: from `within(s)` on, everything that is said and heard takes `s` seconds at most together: a byte now and then
does not stretch it.
Does not know: what is said.
"""

import socket
import time
from collections.abc import Callable
from typing import Any, Final, Self, TypeVar

T = TypeVar("T")
LATE: Final = "the answer did not come in time"
NEVER: Final = float("inf")
LEAST_BYTES_PER_S: Final = 8 << 20  # of what is slower, the rest does not count: a link of 100 Mbit gives more


def seconds_for(num_bytes: int) -> float:
    """How long so many bytes may be on their way, beside the time for an answer to begin."""
    return num_bytes / LEAST_BYTES_PER_S


class Deadline:
    """A moment that several sockets and calls share.

    Owns: the moment, of the monotonic clock.
    """

    def __init__(self) -> None:
        self._until = NEVER

    def within(self, seconds: float) -> None:
        """Everything from now on ends by then."""
        self._until = time.monotonic() + seconds

    @property
    def is_ahead(self) -> bool:
        """It is not over yet."""
        return time.monotonic() < self._until

    def left(self) -> float:
        """Seconds until then. Raises `TimeoutError` when there are none."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError(LATE)
        return left


class TimedSocket(socket.socket):
    """A socket that keeps to a deadline.

    Owns: the descriptor, and the time limit of single calls that was set beside the deadline.
    """

    @classmethod
    def of(cls, plain: socket.socket, deadline: Deadline | None = None) -> Self:
        """Take over a socket; the plain one is not used any more."""
        asked = plain.gettimeout()
        made = cls(plain.family, plain.type, plain.proto, fileno=plain.detach())
        made.deadline = Deadline() if deadline is None else deadline
        made.settimeout(asked)
        return made

    deadline: Deadline
    _asked: float | None = None

    def within(self, seconds: float) -> None:
        """See `Deadline.within`."""
        self.deadline.within(seconds)

    def settimeout(self, value: float | None) -> None:
        self._asked = value
        super().settimeout(value)

    def _in_time(self, call: Callable[..., T], *args: Any) -> T:
        limit = min(self.deadline.left(), NEVER if self._asked is None else self._asked)
        super().settimeout(None if limit == NEVER else limit)
        try:
            return call(*args)
        except TimeoutError:
            raise TimeoutError(LATE) from None

    def recv(self, *args: Any) -> bytes:
        return self._in_time(super().recv, *args)

    def recv_into(self, *args: Any) -> int:
        return self._in_time(super().recv_into, *args)

    def send(self, *args: Any) -> int:
        return self._in_time(super().send, *args)

    def sendall(self, *args: Any) -> None:
        self._in_time(super().sendall, *args)  # the standard library counts all of one call together
