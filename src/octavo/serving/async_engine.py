"""One request in, a stream of outputs back, cancel anywhere: the engine for asynchronous doors.

Promises: a request that cannot be served is refused before anything of it is sent (`open`); every stream ends,
with its last output or with an error, even if the engine dies or hangs (OPS-11); a stream that is closed, cancelled or
forgotten stops its request in the engine; two requests never mix, whatever ids their clients chose (ABT-02).
Does not know: HTTP, chat, or where the engine runs.

Outputs arrive on a thread of the client's. They are handed to the event loop with one wake-up for all that
came since the last one, and a reader that is slower than the engine gets several outputs as one.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, Unpack

from octavo.base.errors import EngineDead, OverloadedError
from octavo.base.outputs import CacheChanges, EngineOutputs, RequestOutput
from octavo.base.params import SamplingParams
from octavo.engine.client import EngineClient
from octavo.engine.heartbeat import HEARTBEAT_S, Pulse
from octavo.observe.log import get_logger
from octavo.observe.stats import NullStats, StatsSink
from octavo.outputs.assembler import OutputAssembler
from octavo.outputs.detokenizer import TokenDecoder
from octavo.serving.cache_feed import Feed, NoFeed
from octavo.serving.info import EngineInfo
from octavo.serving.intake import Intake, RequestIds, RequestOptions, check_answers
from octavo.serving.stream import Mailbox, Stream

if TYPE_CHECKING:
    from octavo.inputs.limits import RequestLimits
    from octavo.inputs.renderer import EngineInput

ABORT_GRACE_S = 5.0  # an abort takes one step of the engine

logger = get_logger(__name__)


class AsyncEngine:
    """The engine of one event loop.

    `id_prefix` tells this front's requests from other fronts'; a random one is made when it is not given.

    Owns: the assembler, the open streams, the outputs on their way from the client's thread, and the engine's pulse.
    """

    def __init__(
        self,
        client: EngineClient,
        decoder: TokenDecoder,
        limits: "RequestLimits",
        info: EngineInfo,
        clock: Callable[[], float] = time.monotonic,
        *,
        stats: StatsSink | None = None,
        feed: Feed | None = None,
        id_prefix: str | None = None,
    ) -> None:
        self._client = client
        self._info = info
        self._clock = clock
        self._stats = stats or NullStats()
        self._feed: Feed = NoFeed() if feed is None else feed
        prefix = secrets.token_hex(4) + "-" if id_prefix is None else id_prefix
        self._intake = Intake(limits, info, RequestIds(prefix), clock)
        self._assembler = OutputAssembler(decoder)
        self._streams: dict[str, Mailbox] = {}  # by parent id
        self._waiting: set[str] = set()  # answers that have had no token yet
        self._inbox: deque[EngineOutputs] = deque()
        self._woken = False  # a drain is on its way
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death: str | None = None
        self._admitting = True
        self._pulse = Pulse()
        self._watch: asyncio.Task[None] | None = None
        self._dead = asyncio.Event()
        self._idle: asyncio.Event = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Begin delivery on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._client.start(self._on_outputs, self._on_death)
        self._watch = asyncio.create_task(self._keep_watch())

    async def stop(self) -> None:
        """End every open stream with an error and free the engine, which is not waited for when it does not react; may be
        called twice."""
        if self._watch is not None:
            self._watch.cancel()
        self._die("the server is stopping")
        if self.late and self._client.alive():
            self._client.give_up(EngineDead("the engine did not react when the server stopped"))
        await asyncio.to_thread(self._client.close)

    def alive(self) -> bool:
        """False once the engine is gone."""
        return self._death is None and self._client.alive()

    @property
    def late(self) -> bool:
        """True while the engine shows no sign of life: what it was sent may still be answered, or never."""
        return self._pulse.late

    async def death(self) -> None:
        """Wait until the engine is gone."""
        await self._dead.wait()

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    async def open(self, input: "EngineInput", params: SamplingParams, **options: Unpack[RequestOptions]) -> Stream:
        """Send a request and give its stream.

        Raises `ClientError` when it cannot be served, `OverloadedError` when too many wait, `EngineDead` when
        the engine is gone; then nothing was sent.
        """
        loop = self._living_loop()
        limit = self._info.max_waiting_requests
        check_answers(1, params.n, limit)
        if len(self._waiting) + params.n > limit:
            self._stats.refused()
            raise OverloadedError(
                f"{len(self._waiting)} requests wait and at most {limit} may wait here; try again later"
            )
        prepared = self._intake.prepare(input, params, options)
        opening = prepared.opening
        self._assembler.open(opening)
        mailbox = Mailbox(opening.parent_id, opening.params.output_kind)
        self._streams[opening.parent_id] = mailbox
        self._waiting.update(opening.request_ids)
        self._idle.clear()
        try:
            self._client.submit(prepared.requests)
        except BaseException:
            self._assembler.close(opening.parent_id, 0.0)
            self._forget(mailbox, opening.request_ids)
            mailbox.end()
            raise
        logger.debug("request %s is %s of the client", opening.parent_id, options.get("client_id") or "(no id)")
        return Stream(mailbox, self._abandon, loop)

    async def generate(
        self, input: "EngineInput", params: SamplingParams, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request; errors of `open` are raised by the first step. Closing it aborts the request."""
        async with await self.open(input, params, **options) as stream:
            async for output in stream:
                yield output

    async def call(self, method: str, timeout_s: float = 30.0, **args: Any) -> Any:
        """An administrative call on the engine, off the event loop."""
        return await asyncio.to_thread(self._client.call, method, timeout_s, **args)

    async def abort(self, request_id: str) -> None:
        """Stop a request from outside: its reader gets a last output with finish reason `abort`."""
        if ids := tuple(i for i in self._assembler.open_ids() if i == request_id or i.startswith(f"{request_id}.")):
            self._client.abort(ids)

    async def drain(self, timeout_s: float) -> bool:
        """Take no more requests and wait for the open ones (OPS-10); after `timeout_s` abort what is left.

        True when all ended by themselves. Readers of aborted requests get finish reason `abort`.
        """
        self._admitting = False
        if await self._until_idle(timeout_s):
            return True
        if self.alive() and (ids := self._assembler.open_ids()):
            self._client.abort(ids)
            await self._until_idle(ABORT_GRACE_S)
        return False

    async def _until_idle(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _living_loop(self) -> asyncio.AbstractEventLoop:
        if self._death is not None:
            raise EngineDead(self._death)
        if self._loop is None:
            raise EngineDead("the engine was not started")
        if not self._admitting:
            raise OverloadedError("this server is shutting down and takes no more requests; try another")
        return self._loop

    # ---- on the client's thread ----

    def _on_outputs(self, outputs: EngineOutputs) -> None:
        self._inbox.append(outputs)
        if not self._woken:
            self._woken = True
            self._on_loop(self._drain_inbox)

    def _on_death(self, error: Exception) -> None:
        logger.error("the engine is gone: %s", error)
        self._on_loop(self._die, str(error) or type(error).__name__)

    def _on_loop(self, call: Callable[..., None], *args: Any) -> None:
        if self._loop is None or self._loop.is_closed():
            return
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # closed in between: nobody is left to tell
            logger.debug("outputs came after the event loop was closed")

    # ---- on the event loop ----

    async def _keep_watch(self) -> None:
        """Feel the engine's pulse, and give it up when it is gone or hangs for too long."""
        try:
            while self._death is None:
                await asyncio.sleep(HEARTBEAT_S)
                was_late = self.late
                self._pulse.feel(self._client.heartbeat())
                if self.late != was_late:
                    level = logging.INFO if was_late else logging.WARNING
                    logger.log(level, "the engine %s", "shows signs of life again" if was_late else self._silence())
                if (why := self._pulse.over(self._info.hang_timeout_s)) is not None:
                    self._give_up(EngineDead(why))
        except Exception as error:  # nobody else would notice an engine that hangs
            logger.exception("the watch over the engine failed")
            self._give_up(EngineDead(f"the watch over the engine failed: {error!r}"))

    def _silence(self) -> str:
        limit_s = self._info.hang_timeout_s
        then = f"; it is given up after {limit_s:g} s" if limit_s else ""
        return f"shows no sign of life: it is frozen, or a step hangs{then}"

    def _give_up(self, error: EngineDead) -> None:
        self._client.give_up(error)
        self._die(str(error))

    def _drain_inbox(self) -> None:
        self._woken = False  # before reading, so that what comes from now on wakes us again
        try:
            while self._inbox:
                self._dispatch(self._inbox.popleft())
        except Exception as error:  # the assembler keeps errors to their requests: here everybody is concerned
            logger.exception("outputs of the engine could not be handed on")
            self._give_up(EngineDead(f"outputs of the engine could not be handed on: {error!r}"))

    def _dispatch(self, outputs: EngineOutputs) -> None:
        if self._waiting:
            self._waiting.difference_update(d.request_id for d in outputs.deltas if d.new_token_ids or d.finish)
        pushed = self._assembler.push(outputs, self._clock())
        if pushed.aborts:
            self._abort_in_engine(tuple(pushed.aborts))
        for output in pushed.outputs:
            mailbox = self._streams.get(output.request_id)
            if mailbox is None:
                continue
            mailbox.put(output)
            if output.finished:
                self._forget(mailbox, ())
        if pushed.gaps_s:
            self._stats.gaps(pushed.gaps_s)
        for record in pushed.ended:
            self._stats.ended(record)
        if outputs.stats is not None:
            self._stats.absorb(outputs.stats)
        if outputs.cache is not None:
            self._absorb(outputs.cache)

    def _absorb(self, changes: CacheChanges) -> None:
        try:
            self._feed.absorb(changes)
        except Exception:  # followers may come again and find nobody; requests have nothing to do with it
            logger.exception("changes of the cache could not be told; nobody is told of them any more")
            self._feed.close()

    def _die(self, why: str) -> None:
        """The engine is gone: nobody waits in silence."""
        if self._death is not None:
            return
        self._death = why
        self._drain_inbox()
        self._dead.set()
        self._stats.engine_died()
        self._feed.close()
        for mailbox in list(self._streams.values()):
            _, records = self._assembler.close(mailbox.request_id, self._clock())
            for record in records:
                self._stats.ended(record)
            mailbox.fail(why)
        self._streams.clear()
        self._waiting.clear()
        self._idle.set()

    def _abandon(self, request_id: str) -> None:
        """The reader is gone."""
        mailbox = self._streams.get(request_id)
        if mailbox is None:
            return
        ids, records = self._assembler.close(request_id, self._clock())
        self._forget(mailbox, ids)
        mailbox.end()
        for record in records:
            self._stats.ended(record)
        if ids:
            self._abort_in_engine(ids)

    def _forget(self, mailbox: Mailbox, request_ids: tuple[str, ...]) -> None:
        self._streams.pop(mailbox.request_id, None)
        self._waiting.difference_update(request_ids)
        if not self._streams:
            self._idle.set()

    def _abort_in_engine(self, ids: tuple[str, ...]) -> None:
        try:
            self._client.abort(ids)
        except EngineDead:  # its death is being told to everybody anyway
            logger.debug("an abort came after the engine's death")
