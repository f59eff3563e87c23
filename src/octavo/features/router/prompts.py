"""The token ids of a request's prompt, as the servers behind the router make them.

Promises: a server's own renderer is asked, so the ids are the ones it will compute; it is asked only when knowing them
could change who is chosen, and a prompt that cannot be had in time is simply not known.
Does not know: templates or tokenizers.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence

import httpx2
import msgspec

from octavo.features.router.bodies import Body, RouteKind, only_prompt
from octavo.features.router.fleet import Fleet
from octavo.features.router.journey import Leg
from octavo.features.router.prompt import Prompt
from octavo.features.router.upstream import NOT_JSON

logger = logging.getLogger(__name__)

RENDER_TIMEOUT_S = 2.0


class _RenderedPrompt(msgspec.Struct):
    prompt_token_ids: list[int]


class _Rendered(msgspec.Struct):
    prompts: list[_RenderedPrompt]


class Prompts:
    """Owns: nothing; the client has the connections."""

    def __init__(self, client: httpx2.AsyncClient, fleet: Fleet) -> None:
        self._client = client
        self._fleet = fleet

    async def of(
        self, kind: RouteKind, body: Body, raw: bytes, headers: Mapping[str, str], legs: Sequence[Leg]
    ) -> Prompt:
        """The prompt as caches name it; without tokens where they are not known, or would matter for none of `legs`."""
        leg = next((leg for leg in legs if self._fleet.informed(leg)), None)
        if leg is None:
            return Prompt()
        given = only_prompt(body) if kind is RouteKind.COMPLETION else None
        ids = given if isinstance(given, list) else await self._rendered(kind, raw, headers, leg)
        if not all(0 <= token < 1 << 32 for token in ids):
            return Prompt()
        salt = body.get("cache_salt")
        return Prompt(ids, salt if isinstance(salt, str) else None)

    async def _rendered(self, kind: RouteKind, raw: bytes, headers: Mapping[str, str], leg: Leg) -> list[int]:
        member = min(self._fleet.usable(leg), key=lambda m: m.in_flight)
        try:
            async with asyncio.timeout(RENDER_TIMEOUT_S):
                answer = await self._client.post(f"{member.url}{kind}/render", content=raw, headers=dict(headers))
            if answer.status_code != 200:  # whoever answers the request will say what is wrong with it
                return []
            prompts = msgspec.json.decode(answer.content, type=_Rendered).prompts
        except (httpx2.HTTPError, TimeoutError, *NOT_JSON) as error:
            logger.info("%s did not render a prompt, which is routed by load: %r", member.name, error)
            return []
        return prompts[0].prompt_token_ids if len(prompts) == 1 else []
