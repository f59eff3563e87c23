"""Keeps what is known of the servers behind the router: whether they are well, and what their caches hold.

Promises: every server is checked in turn, however others behave: whether it is ready for requests, which a frozen engine
and a server that stops are not; what runs on a server whose checks fail is given up; a stream of cache events that breaks, has a gap, or begins anew leaves nothing of what was known before.
Does not know: requests.
"""

import asyncio
import logging
from collections.abc import Mapping

import httpx2
import msgspec

from octavo.features.router.fleet import Fleet, Member
from octavo.features.router.health import InstanceState
from octavo.features.router.options import RouterOptions
from octavo.features.router.upstream import (
    DRAINING_S,
    NOT_JSON,
    UpstreamResponse,
    draining_s,
    error_code,
    error_message,
    unreachable,
)
from octavo.kvcache.published import Note, StartOver

logger = logging.getLogger(__name__)

NOT_WELL = frozenset({"engine_silent", "engine_dead", "starting"})  # what a server says of itself
EVENTS_OFF_S = 10.0  # between two looks at a server that does not tell
EVENTS_REST_S = 1.0  # after a stream that broke
EVENTS_SILENCE_S = 60.0  # servers comment their silence more often than that


class InstanceWatch:
    """Owns: its tasks, two a server, and which servers know no /ready."""

    def __init__(
        self, fleet: Fleet, client: httpx2.AsyncClient, config: RouterOptions, headers: Mapping[str, str]
    ) -> None:
        self._fleet = fleet
        self._client = client
        self._config = config
        self._headers = dict(headers)
        self._tasks: list[asyncio.Task[None]] = []
        self._without_ready: set[str] = set()

    async def start(self) -> None:
        """Check every server once, which its owner tells, then keep on."""
        await asyncio.gather(*(self._looked(member) for member in self._fleet.members))
        for member in self._fleet.members:
            self._tasks.append(asyncio.create_task(self._keep_checking(member)))
            self._tasks.append(asyncio.create_task(self._keep_following(member)))

    async def stop(self) -> None:
        """End all tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- health ----

    async def _keep_checking(self, member: Member) -> None:
        while True:
            await asyncio.sleep(self._config.health_interval_s)
            try:
                await self._check(member)
            except Exception:  # whatever one server does, the next check comes
                logger.exception("a check of %s failed in an unexpected way", member.name)

    async def _check(self, member: Member) -> None:
        before = member.health.state
        if await self._looked(member):
            member.give_up()
        if (now := member.health.state) is not before:
            level = logging.INFO if now is InstanceState.UP else logging.WARNING
            logger.log(level, "%s is %s%s", member.name, now, member.health.why and f": {member.health.why}")

    async def _looked(self, member: Member) -> bool:
        """One check, which has failed whatever the server did to make it end in an unexpected way."""
        try:
            return await self._failed(member)
        except Exception as error:
            return member.health.failed(f"a check failed in an unexpected way: {error!r:.200}")

    async def _failed(self, member: Member) -> bool:
        """One check. True when the server is to be given up with it."""
        health, limit_s = member.health, self._config.health_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                response = await self._client.get(member.url + self._path(member))
                if response.status_code == 404:  # another kind of server
                    self._without_ready.add(member.name)
                    response = await self._client.get(member.url + self._path(member))
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            return health.failed(f"it cannot be connected to: {unreachable(error)}", certain=True)
        except TimeoutError:
            return health.failed(f"it did not answer a check within {limit_s:g} s")
        except httpx2.HTTPError as error:
            return health.failed(f"a check failed: {type(error).__name__} {error}".strip())
        if response.status_code == 200:
            health.passed()
            return False
        answer = UpstreamResponse(response.status_code, response.headers, response.content)
        if error_code(answer.body) in NOT_WELL:
            return health.failed(f"it says: {error_message(answer.body)}", certain=True)
        if answer.status == 503 and (seconds := draining_s(answer)) is not None:
            health.drains(max(seconds, 2 * self._config.health_interval_s, DRAINING_S))
            return False
        return health.failed(f"it answers a check with {response.status_code}")

    def _path(self, member: Member) -> str:
        return "/health" if member.name in self._without_ready else "/ready"

    # ---- caches ----

    async def _keep_following(self, member: Member) -> None:
        while True:
            rest_s = EVENTS_REST_S
            try:
                rest_s = await self._follow(member)
            except (httpx2.HTTPError, *NOT_JSON, StartOver, ValueError) as error:
                logger.debug("cache events of %s: %r", member.name, error)
            except Exception:  # whatever one server does, the next stream is followed
                logger.exception("cache events of %s could not be followed", member.name)
            finally:
                member.mirror.forget()
            await asyncio.sleep(rest_s)

    async def _follow(self, member: Member) -> float:
        """Follow one stream to its end; seconds until the next."""
        timeout = httpx2.Timeout(EVENTS_SILENCE_S, connect=self._config.connect_timeout_s)
        url = f"{member.url}/v1/kv/events"
        async with self._client.stream("GET", url, headers=self._headers, timeout=timeout) as response:
            if response.status_code != 200:
                if response.status_code != 404:
                    logger.info(
                        "%s does not tell what its cache holds: it answers %d", member.name, response.status_code
                    )
                return EVENTS_OFF_S
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    member.mirror.follow(msgspec.json.decode(line[6:], type=Note))
        return EVENTS_REST_S
