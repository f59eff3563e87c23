"""Reads answers: HTTP/1.1 framing, server-sent events, and of each event only what is measured.

Promises: an event that carries text costs one search in its bytes; every other event is parsed in full, so that
errors, usage and the end are never guessed. `parse` is the slow twin of the search.
Does not know: sockets, or what a request was.
"""

import re
from array import array
from typing import Any

import msgspec

from octavo.bench.bodies import CHAT

# The key that an answer's text follows, as compact JSON has it. Other spellings are found by the full parse. Inside a
# JSON string these bytes cannot stand, as its quotes are escaped.
NEEDLES = {CHAT: b'"content":"'}
NEEDLE = b'"text":"'
QUOTE = ord('"')
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)")
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[^\r]*chunked")
_CLOSE = re.compile(rb"\r\nconnection:[^\r]*close")
_EVENTS = re.compile(rb"\r\ncontent-type:[ \t]*text/event-stream")
MAX_MESSAGE = 300


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """What one event says."""

    token: bool = False
    text: str = ""
    done: bool = False
    usage: dict[str, int] | None = None
    error: str | None = None


def parse(data: bytes) -> Event:
    """One event (without its final blank line), read in full."""
    lines = [line[5:].lstrip(b" ") for line in data.split(b"\n") if line.startswith(b"data:")]
    if not lines:
        return Event()  # a comment that keeps the connection open
    payload = b"\n".join(lines)
    if payload == b"[DONE]":
        return Event(done=True)
    try:
        value = msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Event(error="an event of the stream is not JSON")
    if not isinstance(value, dict):
        return Event(error="an event of the stream is not a JSON object")
    if value.get("error") or value.get("object") == "error":
        return Event(error=f"error in the stream: {message_of(value)}")
    choices = value.get("choices") or []
    try:
        text = "".join(_text(choice) for choice in choices)
        token = bool(text) or any(_silent_token(choice) for choice in choices)
    except (AttributeError, TypeError):  # some value is of another type than OpenAI's
        return Event(error="an event of the stream has another shape than OpenAI's")
    return Event(token=token, text=text, usage=_usage(value))


def _text(choice: dict[str, Any]) -> str:
    if "delta" not in choice:
        return choice.get("text") or ""
    delta = choice["delta"] or {}
    found = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
    calls = delta.get("tool_calls") or []
    return found or "".join((call.get("function") or {}).get("arguments") or "" for call in calls)


def _silent_token(choice: dict[str, Any]) -> bool:
    """True for a token that has no text: neither the chat's opening event nor one that only says why it ended."""
    if choice.get("finish_reason") is not None:
        return False
    delta = choice.get("delta")
    return choice.get("text") == "" if delta is None else "role" not in delta and delta.get("content") == ""


def _usage(value: dict[str, Any]) -> dict[str, int] | None:
    """The token counts of an answer, those that are numbers."""
    found = value.get("usage")
    if not isinstance(found, dict):
        return None
    details = found.get("prompt_tokens_details")
    counts = {
        "prompt_tokens": found.get("prompt_tokens"),
        "completion_tokens": found.get("completion_tokens"),
        "cached_tokens": details.get("cached_tokens") if isinstance(details, dict) else None,
    }
    return {name: count for name, count in counts.items() if type(count) is int}


def message_of(value: Any) -> str:
    """The sentence inside an error of any server, short."""
    while isinstance(value, dict):
        value = next((value[k] for k in ("error", "message", "detail") if value.get(k)), "no message")
    return " ".join(str(value).split())[:MAX_MESSAGE]


class AnswerReader:
    """One answer while it comes.

    `keep_text` gathers the answer's text, at the price of parsing each event in full.

    Owns: what has come so far.
    """

    __slots__ = (
        "_events", "_head_done", "_left", "_mode", "_needle", "_partial", "_rest", "_width", "body", "done",
        "error", "keep_alive", "keep_text", "last", "num_events", "pieces", "status", "times", "usage",
    )  # fmt: skip

    def __init__(self, api: str, *, keep_text: bool = False) -> None:
        self._needle = NEEDLES.get(api, NEEDLE)
        self._width = len(self._needle)
        self._head_done = self._events = False
        self._mode = "close"
        self._left = 0
        self._rest = self._partial = b""
        self.status = 0
        self.keep_alive = True
        self.keep_text = keep_text
        self.times: array[float] = array("d")
        self.num_events = 0
        self.last = b""  # the last event with text, which may carry usage
        self.usage: dict[str, int] | None = None
        self.done = False
        self.error: str | None = None
        self.pieces: list[str] = []
        self.body: list[bytes] = []

    @property
    def started(self) -> bool:
        """True once anything has come."""
        return self._head_done or bool(self._rest)

    def feed(self, data: bytes, now: float) -> bool:
        """Take what came at `now`; True when the answer is complete. Raises `ValueError` for broken framing."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        pos = 0
        if not self._head_done:
            pos = self._read_head(data)
            if not pos:
                self._rest = data
                return False
        if self._mode == "chunked":
            return self._read_chunks(data, pos, now)
        self._take(data[pos:], now)
        if self._mode == "length":
            self._left -= len(data) - pos
            return self._left <= 0
        return False

    def closed(self) -> bool:
        """The connection has ended; True when that ends the answer as it should."""
        return self._head_done and self._mode == "close"

    def finish(self, stream: bool) -> None:
        """Draw conclusions from a complete answer: `error`, `usage` and the last of the text."""
        if self._events:
            if self.usage is None and b'"usage"' in self.last:
                self.usage = parse(self.last).usage
            if self.error is None and not self.done:
                self.error = "the stream ended without [DONE]"
            return
        self._finish_plain(stream)

    def _finish_plain(self, stream: bool) -> None:
        try:
            value = msgspec.json.decode(b"".join(self.body))
        except (msgspec.DecodeError, UnicodeDecodeError):
            value = b"".join(self.body[:1]).decode(errors="replace") or "no body"
        if self.status != 200:
            self.error = f"HTTP {self.status}: {message_of(value)}"
        elif stream:
            self.error = "the server did not stream its answer"
        elif not isinstance(value, dict) or not value.get("choices"):
            self.error = f"no choices in the answer: {message_of(value)}"
        else:
            self.usage = _usage(value)
            try:
                first = value["choices"][0]
                self.pieces.append(first.get("text") or first.get("message", {}).get("content") or "")
            except (AttributeError, TypeError, LookupError):
                self.error = "the answer has another shape than OpenAI's"

    def _read_head(self, data: bytes) -> int:
        """Where the body begins, 0 while the head is not complete."""
        start = 0
        while True:
            end = data.find(b"\r\n\r\n", start)
            if end < 0:
                return 0
            if not data.startswith(b"HTTP/1.", start):
                raise ValueError("the answer is not HTTP/1.1")
            self.status = int(data[start + 9 : start + 12])
            if self.status >= 200:
                break
            start = end + 4  # after an interim answer such as 100 Continue
        head = data[start : end + 2].lower()
        self._head_done = True
        self._events = self.status == 200 and _EVENTS.search(head) is not None
        self.keep_alive = _CLOSE.search(head) is None and head.startswith(b"http/1.1")
        if _CHUNKED.search(head):
            self._mode = "chunked"
        elif length := _LENGTH.search(head):
            self._mode, self._left = "length", int(length[1])
        else:
            self.keep_alive = False
        return end + 4

    def _read_chunks(self, data: bytes, pos: int, now: float) -> bool:
        total = len(data)
        while (line := data.find(b"\r\n", pos)) >= 0:
            size = _chunk_size(data[pos:line])
            start = line + 2
            end = start + size
            if not size:
                if data.find(b"\r\n\r\n", line) < 0:
                    break
                return True
            if total < end + 2:
                break
            self._take(data[start:end], now)
            pos = end + 2
        self._rest = data[pos:]
        return False

    def _take(self, payload: bytes, now: float) -> None:
        if not self._events:
            self.body.append(payload)
            return
        if self._partial:
            payload = self._partial + payload
        if b"\r" in payload:
            payload = payload.replace(b"\r\n", b"\n")
        start = 0
        while (end := payload.find(b"\n\n", start)) >= 0:
            self._event(payload[start:end], now)
            start = end + 2
        self._partial = payload[start:]

    def _event(self, event: bytes, now: float) -> None:
        self.num_events += 1
        if not self.keep_text:
            at = event.find(self._needle)
            if at >= 0 and event[at + self._width] != QUOTE:
                self.times.append(now)
                self.last = event
                return
        self._read_fully(event, now)

    def _read_fully(self, event: bytes, now: float) -> None:
        found = parse(event)
        if found.token:
            self.times.append(now)
        if found.text and self.keep_text:
            self.pieces.append(found.text)
        self.done = self.done or found.done
        self.error = self.error or found.error
        self.usage = found.usage or self.usage


def _chunk_size(line: bytes) -> int:
    try:
        size = int(line, 16)
    except ValueError:  # with an extension
        size = int(line.partition(b";")[0], 16)
    if size < 0:
        raise ValueError("a chunk has a negative size")
    return size
