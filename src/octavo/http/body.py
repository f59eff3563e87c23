"""Request bodies: read within a limit, and parsed strictly.

Promises: a body is never held beyond the limit nor awaited for ever; a large one is parsed beside the event loop; what
comes out is one JSON object without duplicate keys, NaN, half surrogates or other encodings, and everything else is a
4xx that says so.
Does not know: what the fields mean.
"""

import asyncio
import codecs
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

from starlette.requests import Request

from octavo.base.errors import ClientError
from octavo.http.errors import ClientGone, HttpError
from octavo.http.json_text import AT_ONCE, parse

T = TypeVar("T")

GRACE_S = 15.0  # how long a body may take in any case
LEAST_BYTES_PER_S = 16 << 10  # and beyond that: whoever is slower only holds a connection
DISCARD_TIMEOUT_S = 5.0  # how long a refused body is still read, so that the client sees the refusal


class BodyReader:
    """Reads and parses the bodies of one server's requests; large ones on a thread of its own, one after the other.

    Owns: that thread.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="octavo-bodies")

    async def read(self, request: Request, make: Callable[[dict[str, Any], bytes], T]) -> T:
        """What `make` makes of the request's JSON object and its bytes as they came; it runs where the parser runs.

        Raises `HttpError` (408, 413, 415), `ClientError` (not a JSON object), `ClientGone`, or what `make` raises.
        """
        _check_type(request)
        raw = await read_body(request, self._limit_bytes)
        if len(raw) <= AT_ONCE:
            return make(parse_object(raw), raw)
        return await asyncio.get_running_loop().run_in_executor(self._thread, _made, raw, make)


def _made(raw: bytes, make: Callable[[dict[str, Any], bytes], T]) -> T:
    return make(parse_object(raw), raw)


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The raw body; the limit holds while reading, whatever Content-Length says."""
    if _declared(request) > limit_bytes:
        await _discard(request, limit_bytes)
        _too_large(limit_bytes)
    chunks: list[bytes] = []
    size = 0
    more = True
    clock = asyncio.get_running_loop().time
    begun_s = clock()
    while more:
        left_s = begun_s + GRACE_S + size / LEAST_BYTES_PER_S - clock()
        try:
            message = await asyncio.wait_for(request.receive(), max(left_s, 0.0))
        except TimeoutError:
            _too_slow()
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


def _declared(request: Request) -> int:
    """What Content-Length says; 0 where it says nothing, or is so long that only its zeros can have let it through."""
    digits = request.headers.get("content-length", "").lstrip("0")
    return int(digits) if len(digits) < 20 and digits.isascii() and digits.isdigit() else 0


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse strictly; raises `ClientError` in the reader's words (API-06)."""
    if not raw.strip():
        raise ClientError("the request body is empty; a JSON object is needed", code="invalid_json")
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\x00" in raw[:4]:
        raise ClientError("the request body must be JSON encoded as UTF-8", code="invalid_json")
    try:
        text = _decoded(raw)
    except UnicodeDecodeError as error:
        place = f"byte {error.start} is not" if len(raw) <= AT_ONCE else "some of it is not"
        raise ClientError(f"the request body must be JSON encoded as UTF-8; {place}", code="invalid_json") from None
    value = parse(text)
    if not isinstance(value, dict):
        raise ClientError(f"the request body must be a JSON object, got {json_kind(value)}", code="invalid_json")
    if "\\ud" in text or "\\uD" in text:
        _refuse_half_surrogates(value)
    return value


def _decoded(raw: bytes) -> str:
    """The text of a body, in steps that are short for other threads. Raises `UnicodeDecodeError`."""
    if len(raw) <= AT_ONCE:
        return raw.decode("utf-8-sig")
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    step = 16 * AT_ONCE
    parts = [decoder.decode(raw[at : at + step]) for at in range(0, len(raw), step)]
    return "".join([*parts, decoder.decode(b"", True)])


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


def _too_slow() -> NoReturn:
    raise HttpError(
        408,
        f"the request body came too slowly: {GRACE_S:g} s and a second more for each {LEAST_BYTES_PER_S} bytes are allowed",
        code="request_timeout",
        headers={"connection": "close"},
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
