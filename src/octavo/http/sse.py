"""Server-sent events, and the watch for clients that go away (ABT-01).

Promises: one event a frame; a comment after long silence; an error in a running stream is one error
event and the end; whoever closes the connection, streamed or plain, stops the work within one step.
Does not know: what the frames say.

One task pumps frames into the socket and a second waits for the client to leave, so that a frame
costs no task of its own.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.http.errors import ClientGone, ServerStopping, answer
from octavo.http.gate import Gate, Ticket

logger = logging.getLogger(__name__)

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_encode = msgspec.json.Encoder().encode
# Line ends to Python's str.splitlines, and so to many clients, but not to JSON: they can stand in its strings only.
_LINE_ENDS = tuple((c.encode(), f"\\u{ord(c):04x}".encode()) for c in "\x85\u2028\u2029")


def frame(payload: msgspec.Struct) -> bytes:
    """One event: `data: {...}` and a blank line, with no character in it that some client takes for a line's end."""
    data = _encode(payload)
    if not data.isascii():
        for raw, escaped in _LINE_ENDS:
            data = data.replace(raw, escaped)
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """A `text/event-stream` answer that pumps `frames` and calls `close` in every case.

    Owns: when something was last sent, and the ticket it gives back at the end.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        *,
        gate: Gate,
        ticket: Ticket,
        keep_alive_s: float,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"} | (headers or {}))
        del self.headers["content-length"]  # the length is not known
        self._frames = frames
        self._close = close
        self._gate = gate
        self._ticket = ticket
        self._keep_alive_s = keep_alive_s
        self._last_sent_s = 0.0
        self._sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; returns early when the client is gone."""
        tasks: list[asyncio.Future[Any]] = []
        try:
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
            pump = asyncio.ensure_future(self._pump(send))
            gone = asyncio.ensure_future(disconnected(receive))
            tasks = [pump, gone]
            await self._watch(pump, gone, send)
        except asyncio.CancelledError:  # the server's time to finish is over: say so in-band (OPS-10)
            if tasks and not self._sending and not any(task.done() for task in tasks):
                tasks[0].cancel()
                await self._finish(send, ServerStopping())
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._frames.aclose()
            await self._close()
            self._gate.leave(self._ticket)

    async def _watch(self, pump: "asyncio.Future[None]", gone: "asyncio.Future[None]", send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._last_sent_s = loop.time()
        waited: set[asyncio.Future[Any]] = {pump, gone, self._ticket.cut}
        while not pump.done() and not gone.done():
            if self._ticket.cut.done():
                pump.cancel()
                await asyncio.gather(pump, return_exceptions=True)
                await self._finish(send, self._ticket.cut.result())
                return
            silent_s = loop.time() - self._last_sent_s
            await asyncio.wait(
                waited, timeout=max(self._keep_alive_s - silent_s, 0.01), return_when=asyncio.FIRST_COMPLETED
            )
            due = loop.time() - self._last_sent_s >= self._keep_alive_s
            if due and not self._sending and not pump.done() and not gone.done():
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                self._last_sent_s = loop.time()
        if pump.done() and not pump.cancelled() and (error := pump.exception()) is not None:
            raise error

    async def _pump(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        try:
            async for data in self._frames:
                self._sending = True
                await send({"type": "http.response.body", "body": data, "more_body": True})
                self._sending = False
                self._last_sent_s = loop.time()
        except Exception as error:  # the status line is out: the client learns it in-band
            await self._finish(send, error)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _finish(self, send: Send, error: Exception) -> None:
        refusal = answer(error)
        if refusal.status >= 500:
            logger.error(
                "a stream ended with an error: %s", refusal.body.error.message, exc_info=_stack(refusal.body, error)
            )
        await send({"type": "http.response.body", "body": frame(refusal.body), "more_body": False})


def _stack(body: Any, error: Exception) -> Exception | None:
    return error if body.error.code == "internal_error" else None


async def disconnected(receive: Receive) -> None:
    """Returns when the client has closed the connection, half or whole."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_gone(receive: Receive, ticket: Ticket, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves or the ticket is cut.

    Raises `ClientGone`, the ticket's error, or what `work` raises. The body must have been read before.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        waited: set[asyncio.Future[Any]] = {task, gone, ticket.cut}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ticket.cut.result() if ticket.cut.done() else ClientGone()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
