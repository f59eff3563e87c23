"""Connections to one server: kept open, used by one request at a time.

Promises: a request that fails because a kept connection had ended meanwhile is sent once more on a new one.
Does not know: what is asked.
"""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import cast
from urllib.parse import urlsplit

from octavo.base.errors import ConfigError
from octavo.bench.answers import AnswerReader

CONNECT_TIMEOUT_S = 30.0


class RequestError(Exception):
    """A request that got no whole answer; the message says why."""


class HttpAddress:
    """Where a server is: `http://host:port` or `https://...`, with or without a path, with or without a final /v1.

    Owns: nothing; made once.
    """

    def __init__(self, base_url: str) -> None:
        try:
            parts = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
            self.port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise ConfigError(f"{base_url!r} is not the URL of a server, such as http://127.0.0.1:8000.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{base_url!r} is not the URL of a server, such as http://127.0.0.1:8000.")
        self.host = parts.hostname
        self.path = parts.path.rstrip("/").removesuffix("/v1")
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.url = f"{parts.scheme}://{parts.netloc}{self.path}"
        self.authority = parts.netloc.rpartition("@")[2]


class HttpConnection(asyncio.Protocol):
    """One connection.

    Owns: its transport, and the answer under way.
    """

    __slots__ = ("_answer", "_clock", "_waiter", "alive", "transport", "used")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answer: AnswerReader | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.transport: asyncio.Transport | None = None
        self.alive = False
        self.used = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready to ask."""
        self.transport = cast(asyncio.Transport, transport)
        self.alive = True

    def data_received(self, data: bytes) -> None:
        """The hot path: stamp, feed, and tell when the answer is whole."""
        now = self._clock()
        answer = self._answer
        if answer is None:  # nothing was asked: do not use this connection again
            self.close()
            return
        try:
            complete = answer.feed(data, now)
        except ValueError as error:
            self._end(RequestError(f"the answer cannot be read: {error}"))
            self.close()
            return
        if complete:
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side has gone, or we have closed."""
        self.alive = False
        if self._answer is not None:
            whole = exc is None and self._answer.closed()
            why = (
                "the connection ended in the middle of the answer"
                if self._answer.started
                else "the connection ended before an answer"
            )
            self._end(None if whole else RequestError(why))

    def ask(self, request: Sequence[bytes], answer: AnswerReader) -> "asyncio.Future[None]":
        """Send a request; the future ends with its answer, or with `RequestError`."""
        if self.transport is None:
            raise RuntimeError("ask() before the connection was made")
        self._answer, self.used = answer, True
        self._waiter = asyncio.get_running_loop().create_future()
        self.transport.writelines(request)
        return self._waiter

    def close(self) -> None:
        """End it now."""
        self.alive = False
        if self.transport is not None:
            self.transport.abort()

    def _end(self, error: RequestError | None) -> None:
        waiter, self._waiter, self._answer = self._waiter, None, None
        if waiter is not None and not waiter.done():
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)


class Connections:
    """The connections of one run.

    Owns: those that are idle.
    """

    def __init__(self, address: HttpAddress, clock: Callable[[], float]) -> None:
        self._address = address
        self._clock = clock
        self._idle: list[HttpConnection] = []

    async def send(self, request: Sequence[bytes], make_answer: Callable[[], AnswerReader]) -> AnswerReader:
        """Ask and wait for the whole answer. Raises `RequestError`; a cancelled request closes its connection."""
        while True:
            connection = self._reused() or await self._connect()
            kept, answer = connection.used, make_answer()
            try:
                await connection.ask(request, answer)
            except RequestError:
                if kept and not answer.started:
                    continue
                raise
            except BaseException:
                connection.close()
                raise
            if answer.keep_alive and connection.alive:
                self._idle.append(connection)
            else:
                connection.close()
            return answer

    def close(self) -> None:
        """Close what is idle."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _reused(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.alive:
                return connection
        return None

    async def _connect(self) -> HttpConnection:
        loop, address = asyncio.get_running_loop(), self._address
        opening = loop.create_connection(
            lambda: HttpConnection(self._clock), address.host, address.port, ssl=address.tls
        )
        try:
            _, connection = await asyncio.wait_for(opening, CONNECT_TIMEOUT_S)
        except TimeoutError:
            raise RequestError(f"no connection to {address.url} within {CONNECT_TIMEOUT_S:g} s") from None
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise RequestError(f"no connection to {address.url}: {reason}") from None
        return connection
