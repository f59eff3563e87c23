"""Answers are read the same however they are cut into pieces, and the quick search agrees with the full parse."""

import contextlib
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.bench.answers import AnswerReader, parse
from tests.bench.scripted import END, STREAM_HEAD, chunk, event, plain, token, usage

DONE = event(b"[DONE]")


def chat(delta, finish=None, **more):
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more})


# event, API, is it a token, its text
EVENTS = [
    (token(" a"), "completions", True, " a"),
    (token('"'), "completions", True, '"'),
    (token('say \\"text\\":\\"\\"'), "completions", True, 'say \\"text\\":\\"\\"'),
    (token(""), "completions", True, ""),  # a token without text of its own
    (event({"choices": [{"text": "", "finish_reason": "length"}]}), "completions", False, ""),
    (event({"choices": [{"text": "z", "finish_reason": "length"}]}), "completions", True, "z"),
    (event(b'{"choices": [{"index": 0, "text": "spaced", "finish_reason": null}]}'), "completions", True, "spaced"),
    (token("a", usage={"prompt_tokens": 1, "completion_tokens": 1}), "completions", True, "a"),
    (usage(3, 4), "completions", False, ""),
    (chat({"role": "assistant", "content": ""}), "chat", False, ""),
    (chat({"role": "assistant", "content": None}), "chat", False, ""),
    (chat({"role": "assistant", "content": "Hi"}), "chat", True, "Hi"),
    (chat({"content": "Hi"}), "chat", True, "Hi"),
    (chat({"content": ""}), "chat", True, ""),
    (chat({}, "stop"), "chat", False, ""),
    (chat({"content": ""}, "stop"), "chat", False, ""),
    (chat({"reasoning_content": "hm"}), "chat", True, "hm"),
    (chat({"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}), "chat", True, '{"a"'),
    (b": keep-alive\n\n", "chat", False, ""),
    (b"event: x\nid: 4\n" + token("e"), "completions", True, "e"),
    (b"data:" + token("f")[6:], "completions", True, "f"),
]


@pytest.mark.parametrize(("data", "api", "is_token", "text"), EVENTS)
@pytest.mark.parametrize("keep_text", [False, True])
def test_an_event_counts_as_a_token_in_the_search_as_in_the_full_parse(data, api, is_token, text, keep_text):
    found = parse(data[:-2])
    assert (found.token, found.text, found.error) == (is_token, text, None)
    answer = AnswerReader(api, keep_text=keep_text)
    answer.feed(STREAM_HEAD + chunk(data), 1.0)
    assert (len(answer.times), answer.num_events, answer.error) == (int(is_token), 1, None)
    assert "".join(answer.pieces) == (text if keep_text else "")


PAYLOAD = token(" a") + b": ping\n\n" + token(" día", id="x" * 70) + token(" c") + usage(5, 4, 2) + DONE


def framings():
    """The same stream in every framing a server may choose."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    cut = [PAYLOAD[i : i + 37] for i in range(0, len(PAYLOAD), 37)]
    return {
        "one chunk": STREAM_HEAD + chunk(PAYLOAD) + END,
        "chunks across events": STREAM_HEAD + b"".join(map(chunk, cut)) + END,
        "chunk extensions and trailers": STREAM_HEAD
        + b"%x;a=b\r\n" % len(PAYLOAD)
        + PAYLOAD
        + b"\r\n0\r\nx: y\r\n\r\n",
        "length": head + b"Content-Length: %d\r\n\r\n" % len(PAYLOAD) + PAYLOAD,
        "lines end in CR LF": STREAM_HEAD + b"".join(chunk(c) for c in [PAYLOAD.replace(b"\n", b"\r\n")]) + END,
        "after an interim answer": b"HTTP/1.1 100 Continue\r\n\r\n" + STREAM_HEAD + chunk(PAYLOAD) + END,
        "until the end": head + b"\r\n" + PAYLOAD,
    }


@pytest.mark.parametrize("name", framings())
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_a_stream_is_read_the_same_in_any_framing_and_any_pieces(name, size):
    data = framings()[name]
    answer = AnswerReader("completions", keep_text=size == 7)
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    complete = [answer.feed(piece, float(i)) for i, piece in enumerate(pieces)]
    if name == "until the end":
        assert not any(complete)
        assert answer.closed()
        assert not answer.keep_alive
    else:
        assert complete == [False] * (len(pieces) - 1) + [True]
        assert answer.keep_alive
    answer.finish(stream=True)
    assert answer.error is None
    assert (len(answer.times), answer.num_events) == (3, 6)
    assert list(answer.times) == sorted(answer.times)
    assert answer.usage["completion_tokens"] == 4
    if size == 7:
        assert "".join(answer.pieces) == " a día c"


def test_the_moment_of_an_event_is_that_of_its_last_byte():
    answer = AnswerReader("completions")
    data = STREAM_HEAD + chunk(token("a"))
    answer.feed(data[:-5], 1.0)
    assert list(answer.times) == []
    answer.feed(data[-5:], 2.0)
    assert list(answer.times) == [2.0]


def test_usage_in_the_last_event_with_text_is_found():
    answer = AnswerReader("completions")
    last = token("b", usage={"prompt_tokens": 3, "completion_tokens": 9})
    assert answer.feed(STREAM_HEAD + chunk(token("a") + last + DONE) + END, 1.0)
    answer.finish(stream=True)
    assert answer.usage == {"prompt_tokens": 3, "completion_tokens": 9}


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (token("a"), "the stream ended without [DONE]"),
        (token("a") + event({"error": {"message": "engine died", "code": 500}}), "error in the stream: engine died"),
        (event({"object": "error", "message": "bad thing"}) + DONE, "error in the stream: bad thing"),
        (event(b"{oops") + DONE, "an event of the stream is not JSON"),
        (event([1]) + DONE, "an event of the stream is not a JSON object"),
        (event({"choices": [7]}) + DONE, "an event of the stream has another shape than OpenAI's"),
    ],
)
def test_a_stream_that_goes_wrong_is_an_error(payload, words):
    answer = AnswerReader("completions")
    assert answer.feed(STREAM_HEAD + chunk(payload) + END, 1.0)
    answer.finish(stream=True)
    assert answer.error == words


@pytest.mark.parametrize(
    ("data", "stream", "words"),
    [
        (plain(400, {"error": {"message": "too long"}}), True, "HTTP 400: too long"),
        (plain(422, {"detail": "no such field"}), True, "HTTP 422: no such field"),
        (plain(503, {"error": "loading"}), False, "HTTP 503: loading"),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 9\r\n\r\n<html>no\n", True, "HTTP 502: <html>no"),
        (b"HTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n", True, "HTTP 500: no body"),
        (plain(200, {"choices": [{"text": "a"}]}), True, "the server did not stream its answer"),
        (plain(200, {"message": "odd"}), False, "no choices in the answer: odd"),
        (plain(200, {"choices": {"a": 1}}), False, "the answer has another shape than OpenAI's"),
    ],
)
def test_an_answer_that_is_no_stream_is_an_error_in_its_own_words(data, stream, words):
    answer = AnswerReader("completions")
    assert answer.feed(data, 1.0)
    answer.finish(stream)
    assert answer.error == words


@pytest.mark.parametrize("choice", [{"text": "hello"}, {"message": {"role": "assistant", "content": "hello"}}])
def test_a_whole_answer_gives_its_usage_and_text(choice):
    answer = AnswerReader("completions")
    assert answer.feed(plain(200, {"choices": [choice], "usage": {"completion_tokens": 2}}), 1.0)
    answer.finish(stream=False)
    assert (answer.error, answer.usage, answer.pieces) == (None, {"completion_tokens": 2}, ["hello"])
    assert list(answer.times) == []


def test_connection_close_is_seen():
    answer = AnswerReader("completions")
    answer.feed(plain(200, {"choices": [{"text": ""}]}, b"Connection: close\r\n"), 1.0)
    assert not answer.keep_alive


@pytest.mark.parametrize("data", [b"SSH-2.0-x\r\n\r\n", STREAM_HEAD + b"zz\r\nabc\r\n"])
def test_what_is_not_http_is_refused(data):
    with pytest.raises(ValueError, match=r"HTTP/1\.1|invalid literal"):
        AnswerReader("completions").feed(data, 1.0)


def test_an_event_without_choices_or_usage_is_nothing():
    assert parse(b"data: " + json.dumps({"choices": None, "usage": None}).encode()) == parse(b": x")


KEYS = st.sampled_from(["choices", "delta", "text", "content", "usage", "error", "message", "role", "tool_calls", "x"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
)


@given(JSON)
def test_no_json_ends_the_client(value):
    data = event(value)
    found = parse(data[:-2])
    assert isinstance(found.token, bool)
    stream = AnswerReader("chat")
    assert stream.feed(STREAM_HEAD + chunk(data + DONE) + END, 1.0)
    stream.finish(stream=True)
    whole = AnswerReader("chat")
    assert whole.feed(plain(200, value), 1.0)
    whole.finish(stream=False)
    assert whole.error or whole.pieces


@given(st.binary(max_size=60), st.booleans())
@example(b"-5\r\nabcdefgh\r\n", True)
@example(b"1;\r\na\r\n0\r\n\r\n", True)
def test_no_bytes_end_the_client(data, after_head):
    answer = AnswerReader("completions")
    with contextlib.suppress(ValueError):
        answer.feed((STREAM_HEAD if after_head else b"") + data, 1.0)
        answer.finish(stream=True)
