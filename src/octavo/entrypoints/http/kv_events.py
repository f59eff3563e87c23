"""`GET /v1/kv/events`: what the prefix cache holds, as server-sent events (SCH-27).

Promises: the notes of `kvcache.published`, one an event; a comment after long silence; a reader who is slower than the
cache is cut off and may come again; the stream ends when the server stops taking requests.
Does not know: who reads.

It has no ticket of the gate: it never ends by itself, and a stop must not wait for it.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.entrypoints.http.context import RouteContext
from octavo.http.gate import Gate
from octavo.http.sse import KEEP_ALIVE, disconnected, frame
from octavo.kvcache.published import Narrator, Note
from octavo.serving.cache_feed import Follower

CUT_S = 2.0  # for the end to reach a reader who was too slow


class CacheEventRoute:
    """Owns: nothing; the front's feed has the state."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context

    async def events(self, request: Request) -> Response:
        """`GET /v1/kv/events`; 404 where nothing is recorded."""
        context = self._context
        context.check_alive()
        feed = context.frontend.feed
        follower = feed.follow()
        if request.method == "HEAD":
            follower.end()
            return Response(media_type=NoteStream.media_type)
        return NoteStream(
            follower,
            Narrator(feed.epoch, feed.scheme),
            gate=context.gate,
            keep_alive_s=context.server.stream_keep_alive_s,
        )


class NoteStream(Response):
    """The answer that follows the feed until somebody leaves.

    Owns: the follower, which leaves the feed with it.
    """

    media_type = "text/event-stream"

    def __init__(self, follower: Follower, narrator: Narrator, *, gate: Gate, keep_alive_s: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]  # the length is not known
        self._follower = follower
        self._narrator = narrator
        self._gate = gate
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the reader leaves, is too slow, or the server stops."""
        tasks: list[asyncio.Future[Any]] = []
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            pump = asyncio.ensure_future(self._pump(send))
            gone = asyncio.ensure_future(disconnected(receive))
            lagging = asyncio.ensure_future(self._follower.lagging.wait())
            tasks = [pump, gone, lagging, asyncio.ensure_future(self._gate.stopped())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not gone.done():
                pump.cancel()
                await asyncio.gather(pump, return_exceptions=True)
                await _finish(send)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._follower.end()

    async def _pump(self, send: Send) -> None:
        async with contextlib.aclosing(self._frames()) as frames:
            async for data in frames:
                await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _frames(self) -> AsyncGenerator[bytes, None]:
        for note in self._narrator.opening(self._follower.snapshot):
            yield frame(note)
        while True:
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    changes = await self._follower.next()
            except TimeoutError:
                yield KEEP_ALIVE
                continue
            if changes is None:
                return
            yield _joined(self._narrator.changes(changes))


def _joined(notes: Iterable[Note]) -> bytes:
    return b"".join(frame(note) for note in notes)


async def _finish(send: Send) -> None:
    """End the answer properly, if the reader lets us; without that the server closes the connection."""
    try:
        async with asyncio.timeout(CUT_S):
            await send({"type": "http.response.body", "body": b"", "more_body": False})
    except TimeoutError:
        return
