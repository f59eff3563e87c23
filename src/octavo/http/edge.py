"""The outermost layer of every request: its id, the key check, its line in the log, and the last word on exceptions.

Promises: every answer carries `X-Request-Id` (the client's own when it sent one); without a valid key
only the open paths answer; no exception leaves this layer as anything but OpenAI's error shape.
Does not know: routes or bodies.
"""

import hashlib
import hmac
import logging
import uuid
from collections.abc import Callable, Sequence

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.http.access import MAX_PATH_CHARS, PROBES, Access
from octavo.http.access import tell as log_access
from octavo.http.errors import ClientGone, HttpError, answer
from octavo.http.json import json_response

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ping", "/ready"})  # probes cannot hold keys, and these say yes or no only
MAX_ID_CHARS = 128
TRACE_HEADERS = ("traceparent", "tracestate")  # passed on as they came


class Keyring:
    """Compares bearer tokens in constant time, whatever the key's length and place in the list."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def admits(self, authorization: bytes) -> bool:
        """True when no keys are set, or the header holds one of them as a bearer token."""
        if not self._digests:
            return True
        scheme, _, token = authorization.partition(b" ")
        given = hashlib.sha256(token.strip()).digest()
        found = False
        for digest in self._digests:  # no early end: time must not tell which key came close
            found |= hmac.compare_digest(digest, given)
        return found and scheme.lower() == b"bearer"


class Edge:
    """ASGI middleware around the whole application. `logs`: a line for each request (see `access`)."""

    def __init__(self, app: ASGIApp, *, keyring: Keyring, new_id: Callable[[], str], logs: bool) -> None:
        self._app = app
        self._keyring = keyring
        self._new_id = new_id
        self._logs = logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; anything but HTTP passes through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        client_id = clean_id(headers.get(b"x-request-id", b"").decode("latin-1"))
        request_id = client_id or self._new_id()
        access = Access(scope, request_id)
        scope.setdefault("state", {}).update(client_id=client_id or request_id, access=access)
        started = False

        async def tell(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            access.sent(message)
            await send(message)

        try:
            if scope["path"] not in OPEN_PATHS and not self._keyring.admits(headers.get(b"authorization", b"")):
                raise _unauthorized()
            await self._app(scope, receive, tell)
        except ClientGone:
            logger.debug("client left before the answer to request %s", request_id)
        except Exception as error:
            if started:  # nothing can be said any more; the server closes the connection
                raise
            await _refuse(error, request_id, scope, receive, tell)
        finally:
            if self._logs:
                log_access(access, scope)


async def _refuse(error: Exception, request_id: str, scope: Scope, receive: Receive, send: Send) -> None:
    refusal = answer(error)
    path = scope["path"][:MAX_PATH_CHARS]
    if refusal.body.error.code == "internal_error":
        logger.error("request %s to %s failed", request_id, path, exc_info=error)
    elif refusal.status >= 500:  # a probe that asks again and again is told why, the log is not
        level = logging.DEBUG if scope["path"] in PROBES else logging.ERROR
        logger.log(level, "request %s to %s failed: %s", request_id, path, refusal.body.error.message)
    response = json_response(refusal.body, status=refusal.status, headers=refusal.headers)
    await response(scope, receive, send)


def _unauthorized() -> HttpError:
    return HttpError(
        401,
        "a valid API key is needed; send it as 'Authorization: Bearer KEY'",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def random_id() -> str:
    """32 hexadecimal digits that nobody can guess."""
    return uuid.uuid4().hex


def clean_id(text: str) -> str:
    """A client's id as it may stand in logs and headers; empty when nothing of it can."""
    return "".join(c for c in text[:MAX_ID_CHARS] if c.isascii() and c.isprintable()).strip()
