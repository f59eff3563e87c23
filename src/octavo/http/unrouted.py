"""Answers to paths and methods that are not there, in OpenAI's shape.

Promises: whoever misspells a route is told which one was asked for.
Does not know: which routes there are.
"""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo.http.errors import HttpError, answer
from octavo.http.json import json_response


async def http_exception(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, in OpenAI's shape."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(getattr(error, "headers", None) or {})
    messages = {404: "there is no such route", 405: "this route does not take this method"}
    detail = messages.get(status, str(getattr(error, "detail", "the request was refused")))
    path = request.scope["path"][:100]
    refusal = answer(HttpError(status, f"{detail}: {request.method[:20]} {path}", code=_code(status), headers=headers))
    return json_response(refusal.body, status=refusal.status, headers=refusal.headers)


def _code(status: int) -> str:
    return {404: "not_found", 405: "method_not_allowed"}.get(status, "http_error")
