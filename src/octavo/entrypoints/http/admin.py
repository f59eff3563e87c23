"""Routes about the server itself: models, health, readiness, metrics, load, cache reset (OPS-6, OPS-10, OPS-11).

Promises: `/health` is red as soon as the engine is gone and within 2 s of its first sign of life that does not come,
`/ready` also while stopping; a probe or a scrape never waits for the engine.
Does not know: how figures are gathered.
"""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import octavo
from octavo.entrypoints.http.context import RouteContext
from octavo.http.json import json_response
from octavo.observe.prometheus import CONTENT_TYPE, PrometheusText


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One served name in OpenAI's shape, with the limits and defaults in force (INP-22)."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: None = None
    max_model_len: int
    default_sampling: dict[str, Any]


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All served names."""

    object: str = "list"
    data: list[ModelCard]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How busy the server is now."""

    requests: int  # HTTP requests that generate, queued ones included
    running: int
    waiting: int
    kv_usage: float  # 0..1


class AdminRoutes:
    """Owns: the renderer of metrics; the door has all other state."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context
        info = context.frontend.info
        about = {"version": octavo.__version__, "usage": info.usage.value}
        self._metrics = PrometheusText(context.frontend.stats, model=info.served_names[0], about=about)

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        names = self._context.frontend.info.served_names
        return json_response(ModelList(data=[self._card(name) for name in names]))

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{model}`; names may hold slashes."""
        return json_response(self._card(self._context.model_name(request.path_params["model"])))

    def _card(self, name: str) -> ModelCard:
        info = self._context.frontend.info
        return ModelCard(
            id=name,
            created=info.created_s,
            root=info.model,
            max_model_len=info.max_model_len,
            default_sampling=dict(info.default_sampling),
        )

    async def plugins(self, request: Request) -> Response:
        """`GET /v1/plugins`: what is installed, and what became of it (PLG-3)."""
        return json_response({"object": "list", "data": self._context.frontend.info.plugins})

    async def health(self, request: Request) -> Response:
        """`GET /health` and `/ping`: 200 while the engine lives and gets on, else 503."""
        self._context.check_lively()
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """`GET /ready`: 200 when new requests are taken and will be answered; 503 when stopping, silent or dead."""
        self._context.check_alive()
        self._context.check_lively()
        return json_response({"status": "ready"})

    async def version(self, request: Request) -> Response:
        """`GET /version`."""
        return json_response({"version": octavo.__version__})

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics` in Prometheus' text format."""
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def load(self, request: Request) -> Response:
        """`GET /load`."""
        stats = self._context.frontend.stats.snapshot
        return json_response(
            Load(
                requests=self._context.gate.num_active,
                running=stats.num_running,
                waiting=stats.num_waiting,
                kv_usage=stats.kv_usage,
            )
        )

    async def reset_prefix_cache(self, request: Request) -> Response:
        """`POST /reset_prefix_cache`, also while requests run; `success` is false when a part still has old content."""
        self._context.check_alive()
        done = await self._context.frontend.engine.call("reset_prefix_cache")
        return json_response({"success": bool(done)})
