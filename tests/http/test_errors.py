"""Every exception has a status and a small body in OpenAI's shape."""

import json

import msgspec
import pytest

from octavo.base.errors import (
    ClientError,
    ConfigError,
    ContextLengthError,
    EngineDead,
    NotFoundError,
    OverloadedError,
    RequestFailed,
)
from octavo.http.errors import MAX_MESSAGE_CHARS, HttpError, ServerStopping, answer


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (ClientError("m", param="p"), 400, "invalid_request_error", None),
        (ContextLengthError("m"), 400, "invalid_request_error", "context_length_exceeded"),
        (NotFoundError("m", code="model_not_found"), 404, "invalid_request_error", "model_not_found"),
        (OverloadedError("m"), 429, "rate_limit_error", "overloaded"),
        (HttpError(401, "m", code="invalid_api_key"), 401, "authentication_error", "invalid_api_key"),
        (HttpError(413, "m", code="request_too_large"), 413, "invalid_request_error", "request_too_large"),
        (EngineDead("m"), 503, "server_error", "engine_dead"),
        (EngineDead(), 503, "server_error", "engine_dead"),
        (ServerStopping(), 503, "server_error", "server_stopping"),
        (RequestFailed("m"), 500, "server_error", "request_failed"),
        (ConfigError("m"), 500, "server_error", "internal_error"),
        (KeyError("secret"), 500, "server_error", "internal_error"),
    ],
)
def test_statuses(error: Exception, status: int, kind: str, code: str | None) -> None:
    told = answer(error)
    detail = told.body.error
    assert (told.status, detail.type, detail.code) == (status, kind, code)
    assert detail.message and "secret" not in detail.message
    assert ("retry-after" in told.headers) == (status in (429, 503))


def test_messages_are_one_short_line_that_can_be_encoded() -> None:
    told = answer(ClientError("bad \ud83d\nvalue " + "x" * 10_000, param="\udc00" * 500))
    detail = json.loads(msgspec.json.encode(told.body))["error"]
    assert len(detail["message"]) == MAX_MESSAGE_CHARS and "\n" not in detail["message"]
    assert len(detail["param"]) <= 100
