"""A strict reader of event streams: what a careful client would check (STR-05, STR-07)."""

import json
from typing import Any

import httpx

_CHUNK_KEYS = {"id", "object", "created", "model", "choices"}


def read_events(raw: bytes) -> list[Any]:
    """Payloads of `data:` events in order, the text '[DONE]' for the end; fails on anything malformed."""
    text = raw.decode("utf-8")
    assert text.endswith("\n\n"), "the stream ends in the middle of an event"
    events = []
    for block in text.split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        assert block.startswith("data: ") and "\n" not in block, f"not an event: {block!r}"
        data = block[len("data: ") :]
        events.append(data if data == "[DONE]" else json.loads(data, parse_constant=_no_constant))
    return events


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


class Stream:
    """A whole stream that passed validation."""

    def __init__(self, response: httpx.Response, *, kind: str, include_usage: bool | None, continuous: bool) -> None:
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].split(";")[0] == "text/event-stream"
        events = read_events(response.content)
        assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
        self.chunks: list[dict[str, Any]] = events[:-1]
        self.usage: dict[str, Any] | None = None
        self.texts: dict[int, str] = {}
        self.finish: dict[int, str] = {}
        self.stop_reason: dict[int, Any] = {}
        assert self.chunks, "no chunk at all"
        for key in ("id", "created", "model", "object"):
            assert len({json.dumps(c[key]) for c in self.chunks}) == 1, f"{key} changes"
        first = self.chunks[0]
        assert first["object"] == kind and type(first["created"]) is int and first["id"] and first["model"]
        self._check_usage(include_usage, continuous)
        seen_role: set[int] = set()
        for chunk in self.chunks:
            assert set(chunk) >= _CHUNK_KEYS
            for choice in chunk["choices"]:
                self._take(choice, kind, seen_role)
        assert set(self.finish) == set(self.texts), "an index without a finish reason"

    def _check_usage(self, include_usage: bool | None, continuous: bool) -> None:
        if include_usage:
            last = self.chunks[-1]
            assert last["choices"] == []
            self.usage = last["usage"]
            assert self.usage["prompt_tokens"] + self.usage["completion_tokens"] == self.usage["total_tokens"]
            assert all(c["choices"] for c in self.chunks[:-1])
            assert all((c["usage"] is not None) == continuous for c in self.chunks[:-1])
        else:
            assert all(c["choices"] for c in self.chunks), "empty choices without usage"
            assert all(c.get("usage") is None for c in self.chunks)

    def _take(self, choice: dict[str, Any], kind: str, seen_role: set[int]) -> None:
        index = choice["index"]
        assert "finish_reason" in choice and "logprobs" in choice
        assert index not in self.finish, "a chunk after the finish reason"
        if kind == "chat.completion.chunk":
            delta = choice["delta"]
            assert set(delta) <= {"role", "content"}
            assert ("role" in delta) == (index not in seen_role), "the role belongs in the first delta only"
            assert delta.get("role", "assistant") == "assistant"
            seen_role.add(index)
            text = delta.get("content", "")
        else:
            text = choice["text"]
        assert isinstance(text, str)
        self.texts[index] = self.texts.get(index, "") + text
        if choice["finish_reason"] is not None:
            self.finish[index] = choice["finish_reason"]
            self.stop_reason[index] = choice.get("stop_reason")


def chat_stream(response: httpx.Response, *, include_usage: bool | None = None, continuous: bool = False) -> Stream:
    """Validate a chat stream."""
    return Stream(response, kind="chat.completion.chunk", include_usage=include_usage, continuous=continuous)


def text_stream(response: httpx.Response, *, include_usage: bool | None = None, continuous: bool = False) -> Stream:
    """Validate a completions stream."""
    return Stream(response, kind="text_completion", include_usage=include_usage, continuous=continuous)


def check_error(response: httpx.Response, status: int, *, param: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape, small, with its field named; returns the error object."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 2500
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error = body["error"]
    assert error["message"] and "Traceback" not in error["message"] and 'File "' not in error["message"]
    if param is not None:
        assert error["param"] == param, error
    return error
