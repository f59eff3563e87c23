"""Answers in JSON.

Promises: one encoder, and one way to answer with it.
Does not know: what is answered.
"""

from typing import Any

import msgspec
from starlette.responses import Response

encode = msgspec.json.Encoder().encode


def json_response(payload: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Any struct or plain value as a JSON answer."""
    return Response(encode(payload), status_code=status, headers=headers, media_type="application/json")
