"""The HTTP application: routes, middleware, and the documents that describe them.

Promises: `create_app` needs a front and the server's options and nothing else; every route but the probes
asks for a key when keys are set; the gate in `app.state.gate` ends admission and drains (OPS-10).
Does not know: sockets, signals, or how the engine was started (its owner starts and stops it).
"""

import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

import octavo
from octavo.config.schema import ServerConfig
from octavo.entrypoints.http.admin import AdminRoutes
from octavo.entrypoints.http.chat import ChatRoute
from octavo.entrypoints.http.completions import CompletionRoute
from octavo.entrypoints.http.context import RouteContext
from octavo.entrypoints.http.document import openapi
from octavo.entrypoints.http.fields import WARNING_HEADER
from octavo.entrypoints.http.kv_events import CacheEventRoute
from octavo.entrypoints.http.logprobs import Bytes
from octavo.entrypoints.http.render import RenderRoutes
from octavo.http.body import BodyReader
from octavo.http.edge import Edge, Keyring, random_id
from octavo.http.errors import HttpError, answer
from octavo.http.gate import Gate
from octavo.http.json import json_response
from octavo.http.unrouted import http_exception
from octavo.serving.frontend import Frontend


def create_app(
    frontend: Frontend,
    server: ServerConfig,
    *,
    clock: Callable[[], float] = time.time,
    new_id: Callable[[], str] = random_id,
) -> FastAPI:
    """The application over a front whose engine its owner starts and stops.

    `app.state.gate` is the `Gate`: call `stop()` when the server should end, then `drained(timeout_s)`,
    then `cut()`.
    """
    context = RouteContext(
        frontend=frontend,
        server=server,
        gate=Gate(),
        clock=clock,
        new_id=new_id,
        bytes_of=Bytes(frontend.renderer.tokenizer),
        bodies=BodyReader(server.max_request_bytes),
    )
    app = FastAPI(title="Octavo", version=octavo.__version__, docs_url=None, redoc_url=None)
    app.state.gate = context.gate
    document = openapi(frontend.info, server)
    app.openapi = lambda: document  # type: ignore[method-assign]
    _add_routes(app, context)
    app.add_exception_handler(HTTPException, http_exception)
    app.add_exception_handler(RequestValidationError, _path_exception)
    app.add_middleware(Edge, keyring=Keyring(server.api_key or ()), new_id=new_id, logs=not server.disable_access_log)
    if server.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(server.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", WARNING_HEADER, "Retry-After"],
        )
    return app


def _add_routes(app: FastAPI, context: RouteContext) -> None:
    admin, render = AdminRoutes(context), RenderRoutes(context)
    chat, completions = ChatRoute(context), CompletionRoute(context)

    def get(path: str, handler: Callable[[Request], Any]) -> None:
        app.add_api_route(path, handler, methods=["GET", "HEAD"], response_model=None)

    def post(path: str, handler: Callable[[Request], Any]) -> None:
        app.add_api_route(path, handler, methods=["POST"], response_model=None)

    post("/v1/completions", completions.create)
    post("/v1/chat/completions", chat.create)
    post("/v1/completions/render", render.completion)
    post("/v1/chat/completions/render", render.chat)
    post("/tokenize", render.tokenize)
    post("/detokenize", render.detokenize)
    post("/reset_prefix_cache", admin.reset_prefix_cache)
    get("/v1/kv/events", CacheEventRoute(context).events)
    get("/v1/models", admin.models)
    get("/v1/models/{model:path}", admin.model)
    get("/v1/plugins", admin.plugins)
    get("/health", admin.health)
    get("/ping", admin.health)
    get("/ready", admin.ready)
    get("/version", admin.version)
    get("/load", admin.load)
    get("/metrics", admin.metrics)


async def _path_exception(_request: Request, _error: Exception) -> Response:
    refusal = answer(HttpError(400, "the request's path or query is not valid", code="invalid_request"))
    return json_response(refusal.body, status=refusal.status)
