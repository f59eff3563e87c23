"""A router in this process, over servers that the test holds.

Promises: `routed` gives it once it has looked at every server; it ends with its block.
Does not know: what stands behind it.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from octavo.config.schema import ServerConfig
from octavo.features.router.addresses import read_addresses
from octavo.features.router.options import RouterOptions
from octavo.features.router.server import Router
from octavo.http.edge import random_id
from tests.support.http_server import serve_app, wait_until

QUICK = {"health_interval_s": 0.05, "health_timeout_s": 0.5, "connect_timeout_s": 1.0, "first_byte_timeout_s": 15.0}


@dataclass
class Routed:
    """A router under test."""

    url: str
    router: Router
    http: httpx.Client

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=body)

    def stream(self, **body: Any) -> list[Any]:
        """Every event of a streamed completion."""
        with self.http.stream("POST", "/v1/completions", json={"stream": True, **body}) as answer:
            assert answer.status_code == 200, answer.read()
            return [read_event(line) for line in answer.iter_lines() if line.startswith("data: ")]

    def figure(self, name: str, **labels: str) -> float:
        """One of the router's figures; 0 when it is not there."""
        text = ",".join(f'{k}="{v}"' for k, v in sorted(labels.items()))
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(f"octavo_router_{name}" + (f"{{{text}}} " if text else " ")):
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    def wait_figure(self, value: float, name: str, **labels: str) -> None:
        """Until a figure has this value: some are counted when the client has its last byte already."""
        assert wait_until(lambda: self.figure(name, **labels) == value), self.figure(name, **labels)

    def wait_state(self, instance: Any, state: str) -> None:
        """Until the router sees a server so."""
        assert wait_until(lambda: self.router.fleet[instance.host].health.state == state, 10.0), instance.name


def read_event(line: str) -> Any:
    """An event's payload, or the end mark as text."""
    return "[DONE]" if line == "data: [DONE]" else json.loads(line[6:])


def words(events: Sequence[Any]) -> list[str]:
    """What a stream said."""
    return [c["text"] for e in events if isinstance(e, dict) for c in e.get("choices", ())]


@contextmanager
def routed(
    *,
    prefill: Sequence[Any] = (),
    decode: Sequence[Any] = (),
    plain: Sequence[Any] = (),
    server: ServerConfig | None = None,
    headers: dict[str, str] | None = None,
    **config: Any,
) -> Iterator[Routed]:
    """A router over these servers, which are anything with a `url`."""
    addresses = read_addresses(*([each.url for each in group] for group in (prefill, decode, plain)))
    router = Router(addresses, RouterOptions(**{**QUICK, **config}), server or ServerConfig(), new_id=random_id)
    with (
        serve_app(router.app, before=router.start, after=router.stop, grace_s=1) as url,
        httpx.Client(base_url=url, timeout=30.0, headers=headers) as http,
    ):
        yield Routed(url, router, http)
