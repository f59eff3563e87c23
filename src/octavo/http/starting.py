"""Answers on a server's port while the server starts: 503, that it is starting, and with what it is busy.

Promises: whoever connects gets an answer, whatever the path, from the moment this is made; `hand_over` leaves the
listening socket to the server without a moment in which it refuses: who connects in between waits in the socket's own
queue. A visitor who is slow, or sends much, delays nobody and is let go after a while.
Does not know: what is being started. It is light, so that a command can answer before it imports a server.
"""

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

import msgspec

from octavo.base.phases import Now
from octavo.http.errors import ErrorDetail, Starting, answer

MAX_HEAD_BYTES: Final = 64 << 10
HEAD_S: Final = 10.0  # for a request's head to come
REST_S: Final = 2.0  # for the rest of a request to come, which is thrown away: closing before would tear the answer
MAX_VISITORS: Final = 256
NO_ROOM_S: Final = 0.05  # rest when the system has no descriptor left
STOP_S: Final = 5.0
_ENDS: Final = (b"\r\n\r\n", b"\n\n")


class StartingBody(msgspec.Struct, frozen=True, kw_only=True):
    """The error in OpenAI's shape, and the same for programs: it is alive, it is not ready, and this is why."""

    error: ErrorDetail
    status: str = "starting"
    alive: bool = True
    ready: bool = False
    phase: str
    phase_seconds: float
    seconds: float


class _Visitor:
    """Owns: a connection, the head that came so far, whether it was answered, and until when it is kept."""

    def __init__(self, connection: socket.socket, until_s: float) -> None:
        self.connection, self.until_s = connection, until_s
        self.head = bytearray()
        self.answered = False


class StartingPort:
    """Answers on `listener`, which is open, in a thread of its own until `hand_over` or `close`. `now`: how far it is.

    Owns: the thread, and the connections that it accepted.
    """

    def __init__(self, listener: socket.socket, now: Callable[[], Now]) -> None:
        listener.setblocking(False)
        self._listener, self._now = listener, now
        self._visitors: set[_Visitor] = set()
        self._handing_over = self._closing = False
        self._left = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="octavo-starting", daemon=True)
        self._thread.start()

    def hand_over(self) -> None:
        """Accept nobody any more. Who was accepted before is still answered."""
        self._handing_over = True
        self._say()
        self._left.wait(STOP_S)

    def close(self) -> None:
        """End, and close what is open but for the listener. May be called twice."""
        self._closing = True
        self._say()
        self._thread.join(STOP_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _say(self) -> None:
        with suppress(OSError):  # the thread may have ended by itself
            self._wake.send(b"x")

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while not self._closing and (self._visitors or not self._left.is_set()):
                self._step()
        finally:
            self._left.set()
            for visitor in list(self._visitors):
                self._let_go(visitor)
            self._selector.close()
            self._woken.close()
            self._wake.close()

    def _step(self) -> None:
        now_s = time.monotonic()
        next_s = min((visitor.until_s for visitor in self._visitors), default=None)
        for key, _ in self._selector.select(None if next_s is None else max(0.0, next_s - now_s)):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._woken:
                self._woken.recv(64)
            else:
                self._hear(key.data)
        now_s = time.monotonic()
        for visitor in [one for one in self._visitors if one.until_s <= now_s]:
            self._let_go(visitor)
        if self._handing_over and not self._left.is_set():
            self._selector.unregister(self._listener)
            self._left.set()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            time.sleep(NO_ROOM_S)
            return
        connection.setblocking(False)
        if len(self._visitors) >= MAX_VISITORS:
            self._let_go(min(self._visitors, key=lambda one: one.until_s))
        visitor = _Visitor(connection, time.monotonic() + HEAD_S)
        self._visitors.add(visitor)
        self._selector.register(connection, selectors.EVENT_READ, visitor)

    def _hear(self, visitor: _Visitor) -> None:
        if visitor not in self._visitors:  # it was let go in this same step
            return
        try:
            data = visitor.connection.recv(MAX_HEAD_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._let_go(visitor)
        elif not visitor.answered:
            visitor.head += data
            if len(visitor.head) >= MAX_HEAD_BYTES or any(end in visitor.head for end in _ENDS):
                self._answer(visitor)

    def _answer(self, visitor: _Visitor) -> None:
        visitor.answered, visitor.until_s = True, time.monotonic() + REST_S
        with suppress(OSError):  # whoever left needs no answer; one so short fits a fresh connection's buffer
            visitor.connection.send(response(self._now(), with_body=not visitor.head.startswith(b"HEAD ")))
            visitor.connection.shutdown(socket.SHUT_WR)
        visitor.head.clear()

    def _let_go(self, visitor: _Visitor) -> None:
        self._visitors.discard(visitor)
        self._selector.unregister(visitor.connection)
        visitor.connection.close()


def response(now: Now, *, with_body: bool = True) -> bytes:
    """The answer that a start which stands at `now` gives to everybody."""
    refusal = answer(Starting(now))
    body = msgspec.json.encode(
        StartingBody(
            error=refusal.body.error,
            phase=now.phase,
            phase_seconds=round(now.seconds, 2),
            seconds=round(now.total_s, 2),
        )
    )
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **refusal.headers,
        "x-request-id": os.urandom(16).hex(),
        "connection": "close",
    }
    lines = ["HTTP/1.1 503 Service Unavailable", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("ascii") + (body if with_body else b"")
