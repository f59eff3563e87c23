"""What every route is given: the front's bundle, the server's options, and how requests are read.

Promises: one place decides which model a name means and which client id goes into logs.
Does not know: the shape of any route.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from octavo.base.errors import EngineDead, NotFoundError
from octavo.config.schema import ServerConfig
from octavo.entrypoints.http.fields import read_fields
from octavo.entrypoints.http.logprobs import Bytes
from octavo.http.body import BodyReader
from octavo.http.edge import TRACE_HEADERS, clean_id
from octavo.http.errors import EngineSilent, ServerStopping
from octavo.http.gate import Gate
from octavo.inputs.tokenizer import Tokenizer
from octavo.serving.frontend import Frontend

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteContext:
    """The collaborators of all routes. `clock` gives Unix seconds; `new_id` gives ids nobody can guess."""

    frontend: Frontend
    server: ServerConfig
    gate: Gate
    clock: Callable[[], float]
    new_id: Callable[[], str]
    bytes_of: Bytes
    bodies: BodyReader

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.frontend.renderer.tokenizer

    async def read(self, kind: type[M], request: Request) -> tuple[M, list[str]]:
        """The request's body as `kind`, with warnings about fields that are not used; raises 4xx errors."""
        return await self.bodies.read(request, lambda body, _: read_fields(kind, body))

    def model_name(self, given: str | None) -> str:
        """The served name to answer with; an absent name means the one model served here.

        Raises `NotFoundError` with code model_not_found.
        """
        names = self.frontend.info.served_names
        if given is None:
            return names[0]
        if given not in names:
            raise NotFoundError(
                f"the model {given[:200]!r} is not served here; this server has {', '.join(names)}",
                param="model",
                code="model_not_found",
            )
        return given

    def check_alive(self) -> None:
        """Raise at once when nothing could be served: `EngineDead` or `ServerStopping` (503)."""
        if self.gate.stopping:
            raise ServerStopping
        if not self.frontend.engine.alive():
            raise EngineDead("the engine is gone; the server must be restarted")

    def check_lively(self) -> None:
        """Raise `EngineDead` or `EngineSilent` (503) while nobody can tell that the engine will answer."""
        engine = self.frontend.engine
        if not engine.alive():
            raise EngineDead("the engine is gone; the server must be restarted")
        if engine.late:
            raise EngineSilent

    def client_id(self, request: Request, from_body: str | None) -> str:
        """What the client calls this request: for logs only, never an internal id (ABT-02)."""
        return clean_id(from_body or "") or str(request.state.client_id)


def trace_headers(request: Request) -> dict[str, str] | None:
    """The W3C trace context, if the client sent one."""
    found = {name: request.headers[name] for name in TRACE_HEADERS if name in request.headers}
    return found or None
