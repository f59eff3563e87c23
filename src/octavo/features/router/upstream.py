"""One request to one server behind the router: its answer, whole or as a stream under way, or why there is none.

Promises: a stream is given out once its first bytes are there, and everything else once it is whole, so that whatever
fails before can be asked of another server; closing a stream closes the connection, which stops the work behind it.
Does not know: which server to ask, or who is asked next.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, TypeVar

import httpx2
import msgspec

from octavo.features.router.fleet import Member
from octavo.features.router.journey import Failure, may_retry
from octavo.features.router.options import RouterOptions
from octavo.http.errors import Unavailable

T = TypeVar("T")
WRITE_TIMEOUT_S = 60.0
# Servers close connections that were idle for 5 s or so; one that is closing must not be used again.
KEEP_CONNECTION_S = 2.0
DRAINING_S = 5.0  # for one that does not say how long
MAX_DRAINING_S = 60.0
MAX_ANSWER_BYTES = 256 << 20  # of an answer that is kept until it is whole
RELAYED_HEADERS = ("content-type", "retry-after", "x-octavo-warning")
NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # what a decoder raises for what a server sent


def make_client(config: RouterOptions) -> httpx2.AsyncClient:
    """The client for everything that the router asks; its owner closes it.

    It keeps no cookies: what a server sets with one client's answer is nothing to other clients or other servers.
    """
    return httpx2.AsyncClient(
        timeout=httpx2.Timeout(None, connect=config.connect_timeout_s, write=WRITE_TIMEOUT_S),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_CONNECTION_S),
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
        headers={"user-agent": "octavo-route", "accept-encoding": "identity"},
        trust_env=False,
    )


class NoInstance(Unavailable):
    """No server behind the router takes requests, or, with `failed`, none that was asked gave an answer."""

    def __init__(self, message: str, *, failed: bool = False) -> None:
        super().__init__(message)
        self.status, self.code = (502, "instance_failed") if failed else (503, "no_instance")


class Unanswered(Exception):
    """A server gave no answer. `answer` is what it said instead, where it said anything."""

    def __init__(self, failure: Failure, why: str, answer: "UpstreamResponse | None" = None) -> None:
        super().__init__(why)
        self.failure = failure
        self.answer = answer


@dataclass(frozen=True, slots=True)
class UpstreamResponse:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Fuse:
    """Ends what is waited for when its server is given up.

    Owns: whether it has blown, and the limit of the wait under way.
    """

    def __init__(self) -> None:
        self._blown = False
        self._limit: asyncio.Timeout | None = None

    def blow(self) -> None:
        """End the wait under way, and every later one."""
        self._blown = True
        if self._limit is not None:
            with contextlib.suppress(RuntimeError):  # it is ending already
                self._limit.reschedule(asyncio.get_running_loop().time())

    async def guard(self, work: Callable[[], Awaitable[T]], timeout_s: float | None) -> T:
        """What `work` gives; raises `Unanswered` when the time is over or the fuse blows."""
        try:
            async with asyncio.timeout(timeout_s) as self._limit:
                if not self._blown:
                    return await work()
        except TimeoutError:
            if not self._blown:
                raise Unanswered(Failure.SLOW, f"it did not answer within {timeout_s:g} s") from None
        finally:
            self._limit = None
        raise Unanswered(Failure.GIVEN_UP, "it does not answer checks any more")


class Running:
    """A stream under way.

    Owns: the response and its place at the member, until `close`.
    """

    def __init__(
        self, member: Member, fuse: Fuse, response: httpx2.Response, first: bytes, rest: AsyncIterator[bytes]
    ) -> None:
        self.member = member
        self.headers: Mapping[str, str] = response.headers
        self._fuse = fuse
        self._response = response
        self._first = first
        self._rest = rest

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """What comes, as it comes; raises `Unanswered` when it breaks off."""
        chunk = self._first
        while chunk:
            yield chunk
            try:
                chunk = await self._fuse.guard(self._next, None)
            except httpx2.HTTPError as error:
                raise Unanswered(Failure.LOST, _why(error)) from None

    async def _next(self) -> bytes:
        return await anext(self._rest, b"")

    async def close(self) -> None:
        """End it, whether it has ended by itself or not; may be called twice."""
        self.member.end(self._fuse.blow)
        if isinstance(self._rest, AsyncGenerator):
            await self._rest.aclose()
        await self._response.aclose()


class Upstream:
    """Owns: nothing; the client has the connections."""

    def __init__(self, client: httpx2.AsyncClient, config: RouterOptions) -> None:
        self._client = client
        self._first_byte_s = config.first_byte_timeout_s

    async def ask(
        self, member: Member, path: str, body: bytes, headers: Mapping[str, str]
    ) -> UpstreamResponse | Running:
        """POST to one server. Raises `Unanswered` when another one should be asked."""
        fuse = Fuse()
        member.begin(fuse.blow)
        got: UpstreamResponse | Running | None = None
        try:
            request = self._client.build_request("POST", member.url + path, content=body, headers=dict(headers))
            got = await fuse.guard(lambda: self._answer(member, fuse, request), self._first_byte_s)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            member.health.refused(_why(error))
            raise Unanswered(Failure.CONNECT, _why(error)) from None
        except httpx2.HTTPError as error:
            raise Unanswered(Failure.LOST, _why(error)) from None
        finally:
            if not isinstance(got, Running):
                member.end(fuse.blow)
        if isinstance(got, UpstreamResponse) and may_retry(got.status, begun=False):
            raise Unanswered(Failure.STATUS, self._note_status(member, got), got)
        return got

    async def _answer(self, member: Member, fuse: Fuse, request: httpx2.Request) -> UpstreamResponse | Running:
        response = await self._client.send(request, stream=True)
        try:
            if (why := unfit(response)) is not None:
                raise Unanswered(Failure.MALFORMED, why)
            streams = response.headers.get("content-type", "").startswith("text/event-stream")
            if not streams or response.status_code != 200:
                return UpstreamResponse(response.status_code, response.headers, await _whole(response))
            rest = response.aiter_raw()
            first = await anext(rest, b"")
            if not first:
                raise Unanswered(Failure.LOST, "its stream ended before it began")
        except BaseException:
            await response.aclose()
            raise
        return Running(member, fuse, response, first, rest)

    @staticmethod
    def _note_status(member: Member, answer: UpstreamResponse) -> str:
        """A server that says that it takes nothing for a while is passed over meanwhile."""
        if answer.status == 503 and (seconds := draining_s(answer)) is not None:
            member.health.drains(seconds)
        return f"it answered {answer.status}"


async def _whole(response: httpx2.Response) -> bytes:
    """The body; raises `Unanswered` for one that would fill this machine's memory."""
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise Unanswered(Failure.MALFORMED, f"its answer is larger than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


def unfit(response: httpx2.Response) -> str | None:
    """Why nobody could be sent this answer, as far as its head says; None when it is fit to be relayed."""
    if not 200 <= response.status_code < 600:
        return f"it answered with the status {response.status_code}, which is none of an answer"
    for name in RELAYED_HEADERS:
        value = response.headers.get(name, "")
        if not (value.isascii() and value.isprintable()):
            return f"its header {name} holds what no header may"
    return None


def draining_s(answer: UpstreamResponse) -> float | None:
    """For how long a server says that it takes no requests; None when it says that it is broken, or nothing."""
    text = answer.headers.get("retry-after")
    if text is None or error_code(answer.body) == "engine_dead":
        return None
    try:
        return min(MAX_DRAINING_S, max(0.0, float(text)))
    except ValueError:  # a date
        return DRAINING_S


def error_code(body: bytes) -> Any:
    """The code in an error of OpenAI's shape, if it is one."""
    try:
        return msgspec.json.decode(body)["error"]["code"]
    except (*NOT_JSON, LookupError, TypeError):
        return None


def error_message(body: bytes) -> Any:
    """The message in an error of OpenAI's shape, if it is one."""
    try:
        return msgspec.json.decode(body)["error"]["message"]
    except (*NOT_JSON, LookupError, TypeError):
        return None


def unreachable(error: BaseException) -> str:
    """Why no connection came about, in the system's words: what the client library says ends with "attempts failed"."""
    deepest: BaseException | None = error
    said = " ".join(str(error).split())[:200] or type(error).__name__
    while deepest is not None:
        if isinstance(deepest, OSError) and deepest.errno and deepest.errno > 0:
            return os.strerror(deepest.errno)
        deepest = deepest.__cause__ or deepest.__context__
    return said


def _why(error: httpx2.HTTPError) -> str:
    if isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout)):
        return f"it cannot be connected to: {unreachable(error)}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".removesuffix(": ")
