"""`GET /v1/models` of a router: what the servers behind it say, and what all of them can take.

Promises: a context length that every server on a request's way takes, whichever is chosen (PDX-12); a server that does not
answer in time is left out.
Does not know: who is chosen for what.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx2
import msgspec
from starlette.responses import Response

from octavo.features.router.fleet import Fleet, Member
from octavo.features.router.relay import INSTANCE_HEADER
from octavo.features.router.upstream import NOT_JSON, NoInstance, unfit

MODELS_TIMEOUT_S = 10.0
LENGTH = "max_model_len"

RelayedResponse = tuple[Member, httpx2.Response]


class Models:
    """Owns: nothing; the client has the connections."""

    def __init__(self, client: httpx2.AsyncClient, fleet: Fleet) -> None:
        self._client = client
        self._fleet = fleet

    async def answer(self, path: str, headers: Mapping[str, str]) -> Response:
        """What the first server says, with the shortest context of any; raises `NoInstance` when nobody answers."""
        members = [member for member in self._fleet.members if member.health.usable]
        answers = await asyncio.gather(*(self._ask(member, path, headers) for member in members))
        relayed = [each for each in answers if each is not None and each[1].status_code < 500]
        if not relayed:
            raise NoInstance(f"no server behind this router takes requests now: {self._fleet.describe()}")
        member, first = relayed[0]
        sent = {"content-type": first.headers.get("content-type", ""), INSTANCE_HEADER: member.name}
        return Response(_shortened(first.content, [answer.content for _, answer in relayed]), first.status_code, sent)

    async def _ask(self, member: Member, path: str, headers: Mapping[str, str]) -> RelayedResponse | None:
        try:
            async with asyncio.timeout(MODELS_TIMEOUT_S):
                response = await self._client.get(member.url + path, headers=dict(headers))
        except (httpx2.HTTPError, TimeoutError):
            return None
        babbles = response.status_code == 200 and _decoded(response.content) is None
        return None if babbles or unfit(response) else (member, response)


def _shortened(first: bytes, all_of_them: Sequence[bytes]) -> bytes:
    """One server's answer with the shortest context that any of them tells for the same model."""
    shortest: dict[Any, int] = {}
    for body in all_of_them:
        for card in _cards(_decoded(body)):
            length = card.get(LENGTH)
            if isinstance(length, int):
                name = card.get("id")
                shortest[name] = min(length, shortest.get(name, length))
    answer = _decoded(first)
    changed = False
    for card in _cards(answer):
        length = shortest.get(card.get("id"))
        if length is not None and card.get(LENGTH) != length:
            card[LENGTH] = length
            changed = True
    return msgspec.json.encode(answer) if changed else first


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except NOT_JSON:
        return None


def _cards(answer: Any) -> Iterator[dict[str, Any]]:
    """The models in an answer about all of them, or about one."""
    if isinstance(answer, dict):
        data = answer.get("data")
        for card in data if isinstance(data, list) else [answer]:
            if isinstance(card, dict) and isinstance(card.get("id"), str):
                yield card
