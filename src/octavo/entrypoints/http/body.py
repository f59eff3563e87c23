"""Request bodies: read within a limit, and parsed strictly.

Promises: a body is never held beyond the limit, and what comes out is one JSON object without
duplicate keys, NaN, half surrogates or other encodings; everything else is a 4xx that says so.
Does not know: what the fields mean.
"""

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import Request

from octavo.base.errors import ClientError
from octavo.entrypoints.http.errors import ClientGone, HttpError

IDLE_TIMEOUT_S = 30.0  # longest silence while a body is being sent
DISCARD_TIMEOUT_S = 5.0  # how long a refused body is still read, so that the client sees the refusal


async def read_object(request: Request, limit_bytes: int) -> dict[str, Any]:
    """The request's body as a JSON object.

    Raises `HttpError` (408, 413, 415), `ClientError` (not a JSON object) or `ClientGone`.
    """
    return (await read_object_and_bytes(request, limit_bytes))[0]


async def read_object_and_bytes(request: Request, limit_bytes: int) -> tuple[dict[str, Any], bytes]:
    """The object, and the body as it came, for whoever passes it on."""
    _check_type(request)
    raw = await read_body(request, limit_bytes)
    return parse_object(raw), raw


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The raw body; the limit holds while reading, whatever Content-Length says."""
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared) > limit_bytes:
        await _discard(request, limit_bytes)
        _too_large(limit_bytes)
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        try:
            message = await asyncio.wait_for(request.receive(), IDLE_TIMEOUT_S)
        except TimeoutError:
            raise HttpError(
                408, "the request body did not arrive in time", code="request_timeout", headers={"connection": "close"}
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        more = message.get("more_body", False)
        if size > limit_bytes:
            chunks.clear()
            if more:
                await _discard(request, limit_bytes)
            _too_large(limit_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse strictly; raises `ClientError` in the reader's words (API-06)."""
    if not raw.strip():
        raise ClientError("the request body is empty; a JSON object is needed", code="invalid_json")
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\x00" in raw[:4]:
        raise ClientError("the request body must be JSON encoded as UTF-8", code="invalid_json")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ClientError(
            f"the request body must be JSON encoded as UTF-8; byte {error.start} is not", code="invalid_json"
        ) from None
    value = _loads(text)
    if not isinstance(value, dict):
        raise ClientError(f"the request body must be a JSON object, got {json_kind(value)}", code="invalid_json")
    if "\\ud" in text or "\\uD" in text:
        _refuse_half_surrogates(value)
    return value


def _loads(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise ClientError(f"the request body is not valid JSON: {error.msg} at {where}", code="invalid_json") from None
    except RecursionError:
        raise ClientError("the request body is nested too deeply", code="invalid_json") from None
    except ClientError:
        raise
    except ValueError:  # an integer with thousands of digits
        raise ClientError("the request body holds a number that is too long", code="invalid_json") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ClientError(f"the field {name[:60]!r} is given twice", param=name[:60], code="invalid_json")
            seen.add(name)
    return out


def _constant(name: str) -> NoReturn:
    raise ClientError(f"the request body is not valid JSON: {name} is not a JSON number", code="invalid_json")


def _refuse_half_surrogates(value: dict[str, Any]) -> None:
    """A lone \\ud83d cannot be encoded again: refuse it here, by name."""
    stack: list[tuple[str, Any]] = list(value.items())
    for name in value:
        _encodable(name, "a field's name")
    while stack:
        where, item = stack.pop()
        if isinstance(item, str):
            _encodable(item, where)
        elif isinstance(item, list):
            stack.extend((where, each) for each in item)
        elif isinstance(item, dict):
            for name in item:
                _encodable(name, where)
            stack.extend((where, each) for each in item.values())


def _encodable(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ClientError(
            f"{where} holds half of a surrogate pair, which is not a character", param=where, code="invalid_json"
        ) from None


def json_kind(value: object) -> str:
    """What JSON calls a Python value, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}
    return names.get(type(value), "a number")


def _check_type(request: Request) -> None:
    given = request.headers.get("content-type")
    if given:
        kind, _, rest = given.partition(";")
        kind = kind.strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise HttpError(
                415, f"Content-Type must be application/json, got {kind[:60]!r}", code="unsupported_media_type"
            )
        charset = rest.lower().partition("charset=")[2].split(";")[0].strip(" \"'")
        if charset not in ("", "utf-8", "utf8", "us-ascii", "ascii"):
            raise HttpError(415, f"charset must be utf-8, got {charset[:60]!r}", code="unsupported_media_type")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise HttpError(
            415, f"Content-Encoding {encoding[:60]!r} is not supported; send it plain", code="unsupported_media_type"
        )


def _too_large(limit_bytes: int) -> NoReturn:
    raise HttpError(
        413,
        f"the request body is larger than {limit_bytes} bytes",
        code="request_too_large",
        headers={"connection": "close"},
    )


async def _discard(request: Request, limit_bytes: int) -> None:
    """Read and drop up to another limit's worth, so that a polite client gets to read the 413."""
    if request.headers.get("expect", "").lower() == "100-continue":
        return
    dropped = 0
    try:
        async with asyncio.timeout(DISCARD_TIMEOUT_S):
            while dropped <= limit_bytes:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                dropped += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return
