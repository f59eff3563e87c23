"""Errors as HTTP answers in OpenAI's shape (INP-23).

Promises: every exception has a status, a small JSON body `{"error": {message, type, param, code}}`
and never a stack in it; what only HTTP knows (keys, sizes, content types) is an error here.
Does not know: routes, or how an answer is sent.
"""

import msgspec

from octavo.base.errors import ClientError, EngineDead, OverloadedError, RequestFailed, ServerError
from octavo.base.phases import Now

MAX_MESSAGE_CHARS = 600
OVERLOADED_RETRY_S = 1
STOPPING_RETRY_S = 5
STARTING_RETRY_S = 1


class HttpError(ClientError):
    """A refusal that only HTTP has a word for; `status` is the answer's code."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status
        self.headers = headers or {}


class Unavailable(ServerError):
    """The server cannot serve now: what it answers, in a program's words, and when to ask again (None: not said)."""

    status = 503
    code = "unavailable"
    retry_s: int | None = OVERLOADED_RETRY_S


class ServerStopping(Unavailable):
    """The server takes no more work because it is about to end (OPS-10)."""

    code = "server_stopping"
    retry_s = STOPPING_RETRY_S

    def __init__(self, message: str = "the server is stopping; send the request again to another one") -> None:
        super().__init__(message)


class Starting(Unavailable):
    """The server is not ready yet (OPS-5)."""

    code = "starting"
    retry_s = STARTING_RETRY_S

    def __init__(self, now: Now) -> None:
        super().__init__(
            f"the server is starting: {now.phase}, {now.seconds:.1f} s so far ({now.total_s:.1f} s in all); "
            "send the request again when it is ready"
        )


class EngineSilent(Unavailable):
    """The engine shows no sign of life; it may go on, or be given up (OPS-11)."""

    code = "engine_silent"
    retry_s = None

    def __init__(self) -> None:
        super().__init__("the engine shows no sign of life; it is frozen, or a step hangs")


class ClientGone(Exception):
    """The client closed the connection; nobody reads the answer."""


class ErrorDetail(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The whole error answer; also the payload of an error event in a stream."""

    error: ErrorDetail


class ErrorAnswer(msgspec.Struct, frozen=True):
    """What to send for an exception."""

    status: int
    body: ErrorBody
    headers: dict[str, str] = {}


def not_available(feature: str, *, param: str) -> ClientError:
    """The refusal of a field that is known but not served by this version (INP-20)."""
    return ClientError(f"{feature} is not available in this version; leave it out", param=param, code="not_available")


def answer(error: Exception) -> ErrorAnswer:
    """Status, body and extra headers for any exception."""
    if isinstance(error, ClientError):
        return _client_answer(error)
    if isinstance(error, Unavailable):
        return _make(error.status, str(error), "server_error", code=error.code, retry_s=error.retry_s)
    if isinstance(error, EngineDead):
        message = str(error) or "the engine is gone; the server must be restarted"
        return _make(503, message, "server_error", code="engine_dead", retry_s=STOPPING_RETRY_S)
    if isinstance(error, RequestFailed):
        return _make(500, str(error) or "the request failed in the engine", "server_error", code="request_failed")
    return _make(500, "the server failed on this request; its log says why", "server_error", code="internal_error")


def _client_answer(error: ClientError) -> ErrorAnswer:
    retry_s = OVERLOADED_RETRY_S if isinstance(error, OverloadedError) else None
    kind = "rate_limit_error" if error.status == 429 else "invalid_request_error"
    if error.status == 401:
        kind = "authentication_error"
    headers = error.headers if isinstance(error, HttpError) else {}
    return _make(error.status, error.message, kind, param=error.param, code=error.code, retry_s=retry_s, more=headers)


def _make(
    status: int,
    message: str,
    kind: str,
    *,
    param: str | None = None,
    code: str | None = None,
    retry_s: int | None = None,
    more: dict[str, str] | None = None,
) -> ErrorAnswer:
    headers = dict(more or {})
    if retry_s is not None:
        headers["retry-after"] = str(retry_s)
    detail = ErrorDetail(clean(message), kind, None if param is None else clean(param, 100), code)
    return ErrorAnswer(status, ErrorBody(detail), headers)


def clean(text: str, limit: int = MAX_MESSAGE_CHARS) -> str:
    """`text` as one short line that any JSON encoder takes: client input comes back in part only."""
    line = " ".join(text[: 4 * limit].encode("utf-8", "replace").decode("utf-8").split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
