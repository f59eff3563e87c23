"""One request's outputs on their way to its reader.

Promises: a reader that is slower than the engine gets several outputs as one; a stream that is closed, cancelled or
forgotten before its end is abandoned. Used on one event loop.
Does not know: the engine, or who reads.
"""

import asyncio
import contextlib
from collections.abc import Callable

from octavo.base.errors import EngineDead
from octavo.base.outputs import RequestOutput
from octavo.base.types import OutputKind
from octavo.outputs.assembler import merge


class Mailbox:
    """Where one stream's outputs wait for their reader. Used on the event loop only.

    Owns: the waiting output, the error, and the reader's future.
    """

    __slots__ = ("_item", "_kind", "_waiter", "ended", "error", "request_id")

    def __init__(self, request_id: str, kind: OutputKind) -> None:
        self.request_id = request_id
        self.ended = False  # nothing more will be put
        self.error: str | None = None  # why the engine is gone
        self._kind = kind
        self._item: RequestOutput | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        self._item = output if self._item is None else merge(self._item, output, self._kind)
        self.ended = output.finished
        self._wake()

    def fail(self, why: str) -> None:
        self.error = why
        self.ended = True
        self._wake()

    def end(self) -> None:
        self.ended = True
        self._item = None
        self._wake()

    def take(self) -> RequestOutput | None:
        item, self._item = self._item, None
        return item

    async def wait(self) -> None:
        """Until something was put; one reader at a time."""
        if self._waiter is not None:
            raise RuntimeError("a stream has one reader")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Stream:
    """One request's outputs, as they are made: an asynchronous iterator and context manager.

    It ends after the output whose `finished` is true, or raises `EngineDead`. Closing it, cancelling the
    task that waits in it, or dropping it before its end aborts the request.

    Owns: the right to read its mailbox.
    """

    def __init__(self, mailbox: Mailbox, abandon: Callable[[str], None], loop: asyncio.AbstractEventLoop) -> None:
        self._mailbox = mailbox
        self._abandon = abandon
        self._loop = loop

    @property
    def request_id(self) -> str:
        """The engine's own id of this request."""
        return self._mailbox.request_id

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> RequestOutput:
        try:
            output = await self._next()
        except asyncio.CancelledError:
            self._abandon(self.request_id)
            raise
        if output is None:
            raise StopAsyncIteration
        return output

    async def last(self) -> RequestOutput:
        """Read to the end and give the last output."""
        final: RequestOutput | None = None
        async for output in self:
            final = output
        if final is None:
            raise EngineDead("the request was closed before its first output")
        return final

    async def aclose(self) -> None:
        """Stop the request if it still runs; may be called twice."""
        self._abandon(self.request_id)

    async def __aenter__(self) -> "Stream":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._mailbox.ended and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # closed in between
                self._loop.call_soon_threadsafe(self._abandon, self.request_id)

    async def _next(self) -> RequestOutput | None:
        """The next output; None after the last one."""
        box = self._mailbox
        while True:
            if (item := box.take()) is not None:
                return item
            if box.error is not None:
                raise EngineDead(box.error)
            if box.ended:
                return None
            await box.wait()
