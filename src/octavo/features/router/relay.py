"""One generating request through the router: whom to ask, in which order, and what the client gets.

Promises: nothing reaches the client before a server has begun to answer, and until then another one is asked; after
that a break is told in the stream, in OpenAI's shape, between two events. What a server refuses is relayed as it is.
Does not know: how servers are chosen or reached.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.base.errors import RequestFailed
from octavo.features.router.bodies import Body, RouteKind, decode_body, params_of, prefill_body, worth_disaggregating
from octavo.features.router.fleet import Fleet, Member
from octavo.features.router.journey import Failure, Journey, Leg, Pick
from octavo.features.router.metrics import Outcome, RouterMetrics
from octavo.features.router.prompt import Prompt
from octavo.features.router.prompts import Prompts
from octavo.features.router.upstream import (
    NOT_JSON,
    RELAYED_HEADERS,
    NoInstance,
    Running,
    Unanswered,
    Upstream,
    UpstreamResponse,
)
from octavo.http.errors import answer

logger = logging.getLogger(__name__)

INSTANCE_HEADER = "X-Octavo-Instance"
PREFILL_HEADER = "X-Octavo-Prefill-Instance"
_BORDERS = (b"\n\n", b"\r\n\r\n")
MAX_EVENT_BYTES = 64 << 20  # of an event that is kept until it is whole

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request as the client sent it; `headers` are those that are passed on."""

    kind: RouteKind
    body: Body
    raw: bytes
    headers: Mapping[str, str]


class EventSplitter:
    """Cuts a stream between events, so that what the router adds never lands inside one.

    Owns: the part of an event that has not come to its end.
    """

    def __init__(self) -> None:
        self.rest = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """The whole events of what came so far; raises `Unanswered` for one that does not end."""
        new = max(0, len(self.rest) - max(map(len, _BORDERS)) + 1)  # no event ends before
        self.rest += chunk
        end = max(at + len(mark) if (at := self.rest.rfind(mark, new)) >= 0 else 0 for mark in _BORDERS)
        whole = bytes(self.rest[:end])
        del self.rest[:end]
        if len(self.rest) > MAX_EVENT_BYTES:
            raise Unanswered(Failure.MALFORMED, f"one event of its stream is larger than {MAX_EVENT_BYTES} bytes")
        return whole


class RelayedResponse:
    """What the client is to be sent: a whole answer, or a stream.

    Owns: how the request ended, counted once.
    """

    def __init__(
        self, got: UpstreamResponse | Running, headers: dict[str, str], metrics: RouterMetrics, outcome: Outcome
    ) -> None:
        self.headers = headers
        self.answer = got if isinstance(got, UpstreamResponse) else None
        self._running = got if isinstance(got, Running) else None
        self._metrics = metrics
        self._outcome: Outcome | None = outcome

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Whole events as they come; raises `RequestFailed` when the server breaks off."""
        if self._running is None:
            return
        events = EventSplitter()
        try:
            async with contextlib.aclosing(self._running.chunks()) as chunks:
                async for chunk in chunks:
                    if data := events.feed(chunk):
                        yield data
        except Unanswered as error:
            self._outcome = Outcome.BROKEN
            name = self._running.member.name
            raise RequestFailed(f"the server {name} broke off before the answer was complete: {error}") from None
        self._outcome = Outcome.DONE
        if events.rest:
            yield bytes(events.rest)

    async def close(self) -> None:
        """The client has it, or is gone; may be called twice."""
        if self._outcome is not None:
            self._metrics.outcomes[self._outcome] += 1
            self._outcome = None
        if self._running is not None:
            await self._running.close()


class Relay:
    """Serves requests.

    Owns: nothing; the fleet and the figures have the state.
    """

    def __init__(
        self, fleet: Fleet, upstream: Upstream, prompts: Prompts, metrics: RouterMetrics, *, min_prefill_tokens: int
    ) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._prompts = prompts
        self._metrics = metrics
        self._min_prefill_tokens = min_prefill_tokens

    async def run(self, asked: Asked) -> RelayedResponse:
        """Ask servers until one answers."""
        disagg = self._fleet.disaggregated and worth_disaggregating(asked.body, asked.kind, self._min_prefill_tokens)
        legs = (Leg.PREFILL, Leg.DECODE) if disagg else (Leg.WHOLE,)
        try:
            prompt = await self._prompts.of(asked.kind, asked.body, asked.raw, asked.headers, legs)
            journey = Journey(self._picker(prompt), disagg=disagg)
            try:
                return await self._travel(journey, asked)
            finally:
                if journey.fell_back_from is not None:
                    self._metrics.fallbacks[journey.fell_back_from] += 1
        except asyncio.CancelledError:
            self._metrics.outcomes[Outcome.CLIENT_GONE] += 1
            raise

    def _picker(self, prompt: Prompt) -> Pick:
        def pick(leg: Leg, without: frozenset[str]) -> str | None:
            found = self._fleet.pick(leg, without, prompt)
            if found is None:
                return None
            member, held_tokens = found
            self._metrics.chose(leg, held_tokens)
            return member.name

        return pick

    async def _travel(self, journey: Journey, asked: Asked) -> RelayedResponse:
        last: Unanswered | None = None
        failed: tuple[Leg, Failure] | None = None
        prefilled_by = ""
        while (step := journey.next()) is not None:
            leg, member = step[0], self._fleet[step[1]]
            if failed is not None:
                self._metrics.retries[failed] += 1
                failed = None
            try:
                if leg is Leg.PREFILL:
                    got = await self._prefill(member, asked)
                    if got.status >= 400:
                        return self._relayed(got, member)
                    journey.prefilled(params_of(_decoded(got.body)))
                    prefilled_by = member.name
                    continue
                if journey.params is None:
                    return self._relayed(await self._upstream.ask(member, asked.kind, asked.raw, asked.headers), member)
                body = _encoded(decode_body(asked.body, journey.params))
                return self._relayed(
                    await self._upstream.ask(member, asked.kind, body, asked.headers), member, prefilled_by
                )
            except Unanswered as error:
                last, failed = error, (leg, error.failure)
                journey.failed(error.failure)
                logger.warning("%s failed at %s: %s", leg, member.name, error)
        return self._unserved(last)

    async def _prefill(self, member: Member, asked: Asked) -> UpstreamResponse:
        """Let a server compute the prompt: what it says, or what it has against the request."""
        body = _encoded(prefill_body(asked.body, asked.kind))
        got = await self._upstream.ask(member, asked.kind, body, asked.headers)
        if isinstance(got, Running):
            await got.close()
            raise Unanswered(Failure.MALFORMED, "it streams where a whole answer was asked for")
        if got.status >= 500:
            raise Unanswered(Failure.STATUS, f"it answered {got.status}", got)
        return got

    def _relayed(self, got: UpstreamResponse | Running, member: Member, prefilled_by: str = "") -> RelayedResponse:
        shown = {**_relayed(got.headers), INSTANCE_HEADER: member.name}
        if prefilled_by:
            shown[PREFILL_HEADER] = prefilled_by
        if isinstance(got, Running):
            return RelayedResponse(got, shown, self._metrics, Outcome.CLIENT_GONE)  # until it has come to its end
        return RelayedResponse(got, shown, self._metrics, Outcome.DONE if got.status < 400 else Outcome.REFUSED)

    def _unserved(self, last: Unanswered | None) -> RelayedResponse:
        """Nobody is there, or nobody answered."""
        if last is not None and last.answer is not None:
            return RelayedResponse(last.answer, _relayed(last.answer.headers), self._metrics, Outcome.UNSERVED)
        error = NoInstance(f"no server behind this router takes requests now: {self._fleet.describe()}")
        if last is not None:
            error = NoInstance(f"no server behind this router answered; the last one: {last}", failed=True)
        refusal = answer(error)
        headers = {"content-type": "application/json", **refusal.headers}
        return RelayedResponse(
            UpstreamResponse(refusal.status, headers, encode(refusal.body)), headers, self._metrics, Outcome.UNSERVED
        )


def _relayed(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in RELAYED_HEADERS if name in headers}


def _encoded(body: Mapping[str, Any]) -> bytes:
    """With Python's encoder, which takes whatever its decoder gave, long numbers too."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except NOT_JSON:
        raise Unanswered(Failure.MALFORMED, "its answer is not JSON") from None
