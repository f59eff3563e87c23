"""Strict parsing, and reading within limits (API-06, INP-23)."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from octavo.base.errors import ClientError
from octavo.http.body import parse_object, read_body
from octavo.http.errors import ClientGone, HttpError, answer

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=8), json_values, max_size=5), st.booleans())
def test_objects_come_back_as_they_were(value: dict[str, Any], ascii_only: bool) -> None:
    assert parse_object(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary(max_size=60))
def test_any_bytes_give_an_object_or_a_clients_error(raw: bytes) -> None:
    try:
        assert isinstance(parse_object(raw), dict)
    except ClientError as error:
        told = answer(error)
        assert told.status == 400 and told.body.error.message


def test_messages_point_at_the_place() -> None:
    for raw, words in [
        (b'{"a": 1,\n "b": x}', "line 2 column 7"),
        (b'{"a": 1, "a": 2}', "'a' is given twice"),
        (b"[1]", "got a list"),
        (b"true", "got true"),
        (b"1.5", "got a number"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"m": {"b": ["\\ud800"]}}', "m holds half"),
        (b'{"a": "\xfe"}', "byte 7"),
    ]:
        with pytest.raises(ClientError) as caught:
            parse_object(raw)
        assert words in caught.value.message


def test_whole_surrogate_pairs_are_characters() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


def _request(messages: list[dict[str, Any]], headers: dict[str, str] | None = None) -> Request:
    waiting = iter(messages)

    async def receive() -> dict[str, Any]:
        for message in waiting:
            return message
        await asyncio.Event().wait()
        raise AssertionError

    raw = [(k.encode(), v.encode()) for k, v in (headers or {}).items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": raw}, receive)


def _part(body: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_is_read_to_its_end_within_the_limit() -> None:
    parts = [_part(b"abc", more=True), _part(b"", more=True), _part(b"de", more=False)]
    assert asyncio.run(read_body(_request(parts), 5)) == b"abcde"
    for headers in ({}, {"content-length": "5"}, {"content-length": "1"}, {"content-length": "x"}):
        with pytest.raises(HttpError) as caught:
            asyncio.run(read_body(_request(parts, headers), 4))
        assert caught.value.status == 413 and "4 bytes" in caught.value.message


def test_a_declared_size_is_refused_before_it_is_sent() -> None:
    """A client that asks first (Expect: 100-continue) sends nothing at all."""
    headers = {"content-length": "1000", "expect": "100-continue"}
    with pytest.raises(HttpError):
        asyncio.run(asyncio.wait_for(read_body(_request([], headers), 10), 1))


def test_a_client_that_leaves_while_sending() -> None:
    with pytest.raises(ClientGone):
        asyncio.run(read_body(_request([_part(b"a", more=True), {"type": "http.disconnect"}]), 10))


def test_a_body_that_stops_coming_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.http.body.GRACE_S", 0.01)
    with pytest.raises(HttpError) as caught:
        asyncio.run(read_body(_request([_part(b"a", more=True)]), 10))
    assert caught.value.status == 408
