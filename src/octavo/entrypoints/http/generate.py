"""One generating HTTP request from start to end: open the engine's streams, answer plain or streamed, close.

Promises: everything is validated before the first byte of a stream; when the client leaves, the server
stops or anything fails, every engine stream of the request is closed, which aborts it in the core.
Does not know: OpenAI's shapes (a `Reply` does).
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.base.errors import ClientError, RequestFailed
from octavo.base.outputs import RequestOutput
from octavo.base.params import SamplingParams
from octavo.entrypoints.http.context import RouteContext, trace_headers
from octavo.entrypoints.http.feature_fields import request_parts
from octavo.entrypoints.http.fields import warning_headers
from octavo.entrypoints.http.sampling import asks_max_tokens, limit_names, renamed
from octavo.entrypoints.http.schemas import GenerateRequest
from octavo.entrypoints.http.wire import Usage, make_usage
from octavo.http.access import Access
from octavo.http.errors import ServerStopping
from octavo.http.json import json_response
from octavo.http.sse import EventStream, until_gone
from octavo.inputs.renderer import EngineInput
from octavo.plugins.features import Active
from octavo.serving.async_engine import AsyncEngine
from octavo.serving.info import EngineInfo
from octavo.serving.stream import Stream

AT_ONCE = 16  # prompts that are checked without a pause
Indexed = tuple[int, RequestOutput]  # which prompt of the request, and what came for it


class PromptJob(msgspec.Struct, frozen=True):
    """One prompt to generate for."""

    input: EngineInput
    params: SamplingParams


def make_jobs(
    context: RouteContext, inputs: Sequence[EngineInput], params: SamplingParams, req: GenerateRequest
) -> list[PromptJob]:
    """One job for each prompt, all of them checked before any is sent; raises `ClientError` with its place."""
    jobs = []
    for place, each in enumerate(inputs):
        try:
            checked_params = context.frontend.limits.check(each, params, max_tokens_is_default=not asks_max_tokens(req))
        except ClientError as error:
            raise located(renamed(error, limit_names(req)), place, len(inputs)) from None
        jobs.append(PromptJob(each, checked_params))
    return jobs


async def amake_jobs(
    context: RouteContext, inputs: Sequence[EngineInput], params: SamplingParams, req: GenerateRequest
) -> list[PromptJob]:
    """`make_jobs`, beside the event loop when there are many."""
    if len(inputs) <= AT_ONCE:
        return make_jobs(context, inputs, params, req)
    return await asyncio.to_thread(make_jobs, context, inputs, params, req)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHead:
    """What all chunks of one answer share, and what the client asked to see."""

    id: str
    created: int
    model: str
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    shows_prompt_logprobs: bool
    warnings: tuple[str, ...]
    features: tuple[Active, ...] = ()

    @classmethod
    def of(
        cls, req: GenerateRequest, context: RouteContext, prefix: str, model: str, warnings: Sequence[str]
    ) -> "ChunkHead":
        """A new answer's head; the id is the server's own whatever the client sent."""
        options = req.stream_options
        return cls(
            id=f"{prefix}-{context.new_id()}",
            created=int(context.clock()),
            model=model,
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
            return_token_ids=bool(req.return_token_ids),
            shows_prompt_logprobs=req.prompt_logprobs is not None,
            warnings=tuple(warnings),
            features=context.frontend.info.features,
        )


class Reply(Protocol):
    """How one route answers."""

    def jobs(self) -> Sequence[PromptJob]:
        """The prompts to run."""

    def whole(self, finals: Sequence[RequestOutput]) -> msgspec.Struct:
        """The plain answer."""

    def frames(self, outputs: AsyncIterator[Indexed]) -> AsyncGenerator[bytes, None]:
        """The events of a stream, `[DONE]` included."""


class UsageCount:
    """Usage over all prompts of a request.

    Owns: the last output of each prompt.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int, int]] = {}
        self._sources: dict[int, Mapping[str, int]] = {}

    def note(self, index: int, out: RequestOutput) -> None:
        """Take what `out` says of prompt `index`."""
        self._last[index] = (len(out.prompt_token_ids), out.num_output_tokens, out.num_cached_tokens)
        if out.cached_by_source:
            self._sources[index] = out.cached_by_source

    def total(self) -> Usage:
        """The sums so far."""
        prompt, completion, cached = (sum(column) for column in zip((0, 0, 0), *self._last.values(), strict=True))
        sources: dict[str, int] = {}
        for found in self._sources.values():
            for name, count in found.items():
                sources[name] = sources.get(name, 0) + count
        return make_usage(prompt, completion, cached, sources)


class GenerationRun:
    """The engine streams of one HTTP request.

    Owns: the streams, and the tasks that merge them when there are several.
    """

    def __init__(self, engine: AsyncEngine, info: EngineInfo, access: Access) -> None:
        self._engine = engine
        self._access = access
        self._info = info
        self._streams: list[Stream] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, jobs: Sequence[PromptJob], req: GenerateRequest, request: Request, client_id: str) -> None:
        """Open one stream for each job; raises before anything is answered when one is refused."""
        traces = trace_headers(request)
        parts = request_parts(req, self._info.features, sum(job.params.n for job in jobs))
        for place, job in enumerate(jobs):
            if place:
                await asyncio.sleep(0)  # a batch of thousands does not hold up what streams
            try:
                stream = await self._engine.open(
                    job.input,
                    job.params,
                    client_id=client_id,
                    priority=req.priority or 0,
                    cache_salt=req.cache_salt,
                    trace_headers=traces,
                    parts=parts,
                )
            except ClientError as error:
                raise located(renamed(error, limit_names(req)), place, len(jobs)) from None
            self._streams.append(stream)

    async def outputs(self) -> AsyncGenerator[Indexed, None]:
        """What comes, in the order it comes. Raises `RequestFailed` when the engine gave up on a prompt."""
        if len(self._streams) == 1:
            async for out in self._streams[0]:
                self._access.note(0, out)
                yield 0, checked(out)
            return
        queue: asyncio.Queue[Indexed | Exception | None] = asyncio.Queue(maxsize=len(self._streams))
        self._tasks = [asyncio.create_task(_feed(i, s, queue)) for i, s in enumerate(self._streams)]
        running = len(self._tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                self._access.note(*item)
                yield item[0], checked(item[1])

    async def finals(self) -> list[RequestOutput]:
        """The last output of each prompt, in order."""
        last: dict[int, RequestOutput] = {}
        async for index, out in self.outputs():
            last[index] = out
        if len(last) != len(self._streams):
            raise RequestFailed("the engine ended the request without an answer")
        return [last[i] for i in range(len(self._streams))]

    async def close(self) -> None:
        """End every stream; those that still run are aborted in the core."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stream in self._streams:
            await stream.aclose()


async def _feed(
    index: int, stream: AsyncIterator[RequestOutput], queue: "asyncio.Queue[Indexed | Exception | None]"
) -> None:
    try:
        async for out in stream:
            await queue.put((index, out))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)


def checked(out: RequestOutput) -> RequestOutput:
    """`out`, unless it says that the engine failed on it."""
    if out.error is not None:
        raise RequestFailed(out.error)
    if any(each.finish_reason == "error" for each in out.outputs):
        raise RequestFailed("the request failed in the engine")
    return out


def located(error: ClientError, place: int, num_prompts: int) -> ClientError:
    """Say which prompt of a batch was refused."""
    if num_prompts > 1:
        error.message = f"prompt {place}: {error.message}"
    return error


async def serve(
    context: RouteContext,
    request: Request,
    req: GenerateRequest,
    prepare: Callable[[], Awaitable[Reply]],
    warnings: Sequence[str],
) -> Response:
    """Answer one generating request. `prepare` renders and validates, and makes the reply; it may add `warnings`.

    Raises 4xx and 5xx errors, and `ClientGone`.
    """
    context.check_alive()
    ticket = context.gate.enter()
    run = GenerationRun(context.frontend.engine, context.frontend.info, request.state.access)
    client_id = request.state.access.name = context.client_id(request, req.request_id)
    headers: dict[str, str] = {}

    async def begin() -> Reply:
        reply = await prepare()
        jobs = reply.jobs()
        if jobs[0].params.bad_words:  # spelled beside the event loop, and remembered
            await asyncio.to_thread(context.frontend.limits.bad_words_ids, jobs[0].params)
        await run.start(jobs, req, request, client_id)
        headers.update(warning_headers(warnings, client_id))
        return reply

    async def plain() -> msgspec.Struct:
        reply = await begin()
        return reply.whole(await run.finals())

    async def close() -> None:
        await run.close()

    streaming = False
    try:
        if req.stream:
            reply = await until_gone(request.receive, ticket, begin())
            streaming = True
            return EventStream(
                reply.frames(run.outputs()),
                close,
                gate=context.gate,
                ticket=ticket,
                keep_alive_s=context.server.stream_keep_alive_s,
                headers=headers,
            )
        return json_response(await until_gone(request.receive, ticket, plain()), headers=headers)
    except asyncio.CancelledError:  # the server's time to finish is over: say so instead of hanging up
        raise ServerStopping from None
    finally:
        if not streaming:
            with suppress(asyncio.CancelledError):
                await run.close()
            context.gate.leave(ticket)
