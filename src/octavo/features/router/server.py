"""The router's HTTP application: OpenAI's generating routes over many servers (PDX-12).

Promises: a client sees one server; every answer to a generating request says in `X-Octavo-Instance` who gave it; keys,
ids, limits, the shape of errors and the stop are those of `octavo serve`.
Does not know: sockets or signals (its owner calls `start` and `stop`).
"""

import asyncio
import time
from collections.abc import Callable, Mapping

import httpx2
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import octavo
from octavo.base.errors import ClientError, ConfigError
from octavo.config.schema import ServerConfig
from octavo.features.router.addresses import InstanceAddress
from octavo.features.router.bodies import PARAMS, RouteKind
from octavo.features.router.fleet import Fleet, Member
from octavo.features.router.health import InstanceHealth
from octavo.features.router.journey import Leg
from octavo.features.router.metrics import RouterMetrics
from octavo.features.router.models import Models
from octavo.features.router.options import RouterOptions
from octavo.features.router.prompts import Prompts
from octavo.features.router.relay import INSTANCE_HEADER, PREFILL_HEADER, Asked, Relay
from octavo.features.router.upstream import NoInstance, Upstream, make_client
from octavo.features.router.watch import InstanceWatch
from octavo.http.body import BodyReader
from octavo.http.edge import TRACE_HEADERS, Edge, Keyring
from octavo.http.errors import ServerStopping
from octavo.http.gate import Gate
from octavo.http.json import json_response
from octavo.http.sse import EventStream, until_gone
from octavo.http.unrouted import http_exception
from octavo.observe.prometheus import CONTENT_TYPE


class Router:
    """Everything of one router; `app` is its application.

    Owns: the HTTP client, the fleet and the watch over it.
    """

    def __init__(
        self,
        addresses: tuple[InstanceAddress, ...],
        config: RouterOptions,
        server: ServerConfig,
        *,
        new_id: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for address in addresses:
            _check_url(address.url)
        members = [Member(address, InstanceHealth(config.health_failures, clock)) for address in addresses]
        self.fleet = Fleet(members, load_weight=config.load_weight)
        self.metrics = RouterMetrics(self.fleet)
        self.gate = Gate()
        self._client = make_client(config)
        key = {"authorization": f"Bearer {server.api_key[0]}"} if server.api_key else {}
        self._watch = InstanceWatch(self.fleet, self._client, config, key)
        relay = Relay(
            self.fleet,
            Upstream(self._client, config),
            Prompts(self._client, self.fleet),
            self.metrics,
            min_prefill_tokens=config.min_prefill_tokens,
        )
        self.app = _application(_Routes(self, relay, self._client, server), server, new_id)

    async def start(self) -> None:
        """Look at every server once, then keep watch."""
        await self._watch.start()

    async def stop(self) -> None:
        """End the watch and close all connections."""
        await self._watch.stop()
        await self._client.aclose()


def _application(routes: "_Routes", server: ServerConfig, new_id: Callable[[], str]) -> Starlette:
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(server.allowed_origins or ()),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "X-Octavo-Warning", "Retry-After", INSTANCE_HEADER, PREFILL_HEADER],
    )
    edge = Middleware(Edge, keyring=Keyring(server.api_key or ()), new_id=new_id, logs=not server.disable_access_log)
    return Starlette(
        routes=[
            Route("/v1/completions", routes.complete, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/models", routes.models, methods=["GET"]),
            Route("/v1/models/{model:path}", routes.models, methods=["GET"]),
            Route("/health", routes.health, methods=["GET"]),
            Route("/ping", routes.health, methods=["GET"]),
            Route("/ready", routes.ready, methods=["GET"]),
            Route("/version", routes.version, methods=["GET"]),
            Route("/metrics", routes.metrics, methods=["GET"]),
        ],
        middleware=[cors, edge] if server.allowed_origins else [edge],
        exception_handlers={HTTPException: http_exception},
    )


class _Routes:
    """Owns: nothing; the router has the state."""

    def __init__(self, router: Router, relay: Relay, client: httpx2.AsyncClient, server: ServerConfig) -> None:
        self._router = router
        self._relay = relay
        self._models = Models(client, router.fleet)
        self._server = server
        self._bodies = BodyReader(server.max_request_bytes)

    async def complete(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._generate(request, RouteKind.COMPLETION)

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._generate(request, RouteKind.CHAT)

    async def _generate(self, request: Request, kind: RouteKind) -> Response:
        gate = self._router.gate
        ticket = gate.enter()
        streaming = False
        try:
            body, raw = await self._bodies.read(request, lambda body, raw: (body, raw))
            if body.get(PARAMS):  # whoever may choose them chooses what our servers connect to
                raise ClientError(f"{PARAMS} is between the router and its servers; leave it out", param=PARAMS)
            asked = Asked(kind=kind, body=body, raw=raw, headers=_passed_on(request))
            relayed = await until_gone(request.receive, ticket, self._relay.run(asked))
            if relayed.answer is not None:
                await relayed.close()
                return Response(relayed.answer.body, relayed.answer.status, relayed.headers)
            streaming = True
            keep_alive_s = self._server.stream_keep_alive_s
            return EventStream(
                relayed.frames(),
                relayed.close,
                gate=gate,
                ticket=ticket,
                keep_alive_s=keep_alive_s,
                headers=relayed.headers,
            )
        except asyncio.CancelledError:  # the router's time to finish is over: say so instead of hanging up
            raise ServerStopping from None
        finally:
            if not streaming:
                gate.leave(ticket)

    async def models(self, request: Request) -> Response:
        """`GET /v1/models` and `/v1/models/{model}`, with the context length that every server takes."""
        return await self._models.answer(request.url.path, _passed_on(request))

    async def health(self, request: Request) -> Response:
        """`GET /health` and `/ping`: 200 while any server behind the router may be given requests, else 503."""
        if not self._router.fleet.usable(Leg.WHOLE):
            raise NoInstance("no server behind this router takes requests now")
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """`GET /ready`: as health, and 503 while stopping."""
        if self._router.gate.stopping:
            raise ServerStopping
        return await self.health(request)

    async def version(self, request: Request) -> Response:
        """`GET /version`."""
        return json_response({"version": octavo.__version__})

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics` in Prometheus' text format: the router's own figures."""
        return Response(self._router.metrics.render(), headers={"content-type": CONTENT_TYPE})


def _check_url(url: str) -> None:
    try:
        httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ConfigError(f"{url!r:.80} is not the address of a server: {error}.") from None


def _passed_on(request: Request) -> Mapping[str, str]:
    """The client's headers that reach the servers behind the router."""
    headers = {"content-type": "application/json", "x-request-id": str(request.state.client_id)}
    for name in ("authorization", *TRACE_HEADERS):
        if name in request.headers:
            headers[name] = request.headers[name]
    return headers
