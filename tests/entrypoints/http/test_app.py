"""What holds for every route: bodies, fields, models, keys, ids, limits and errors."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlparse

import httpx
import pytest

from octavo.config.schema import ServerConfig
from octavo.entrypoints.http.fields import WARNING_HEADER
from tests.entrypoints.http.events import check_error, read_events
from tests.entrypoints.http.toy import endless
from tests.entrypoints.http.toy_server import MODEL, Served, toy_server
from tests.support.http_server import wait_until

PATHS = ("/v1/completions", "/v1/chat/completions")
POSTS = (*PATHS, "/tokenize", "/detokenize", "/v1/completions/render", "/v1/chat/completions/render")
BODIES = [
    b'{"model": "m", x}', b"", b"  ", b"[]", b"null", b'"s"', b"123", b"true", b'{"temperature": NaN}',
    b'{"temperature": Infinity}', b'{"a": 1, "a": 2}', b'{"x": {"b": 1, "b": 1}}', b"\xff\xfe{\x00}\x00",
    '{"prompt": "a"}'.encode("utf-16-le"), '{"prompt": "a"}'.encode("utf-16"), '{"prompt": "a"}'.encode("utf-32"),
    b'{"prompt": "\xff"}', b'{"prompt": "a"', b"[" * 100_000, b'{"a":' * 50_000, b'{"prompt": "\\ud83d"}',
    b'{"messages": [{"role": "user", "content": "\\udc00x"}]}', b'{"\\ud83d": 1}', b'{"max_tokens": ' + b"9" * 5000 + b"}",
    b"\x00" * 10, b"<html>", b"{'prompt': 'a'}",
]  # fmt: skip


@pytest.mark.parametrize("path", POSTS)
def test_bodies_that_are_no_json_objects(served: Served, path: str) -> None:
    """API-06: 400 in OpenAI's shape for each, the server goes on."""
    for body in BODIES:
        response = served.http.post(path, content=body, headers={"content-type": "application/json"})
        error = check_error(response, 400)
        assert error["type"] == "invalid_request_error", body[:40]
    assert served.http.get("/health").status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x"])
def test_other_content_types(served: Served, kind: str) -> None:
    """API-06."""
    response = served.http.post(PATHS[0], content=b'{"prompt": "a"}', headers={"content-type": kind})
    assert "application/json" in check_error(response, 415)["message"]


def test_content_types_that_are_json_or_missing(served: Served) -> None:
    body = b'{"prompt": "a", "max_tokens": 1}'
    for headers in (
        {},
        {"content-type": "application/json; charset=UTF-8"},
        {"content-type": "application/vnd.x+json"},
    ):
        assert served.http.post(PATHS[0], content=body, headers=headers).status_code == 200
    assert served.http.post(PATHS[0], content=b"\xef\xbb\xbf" + body).status_code == 200
    latin = {"content-type": "application/json; charset=latin-1"}
    check_error(served.http.post(PATHS[0], content=body, headers=latin), 415)
    check_error(served.http.post(PATHS[0], content=body, headers={"content-encoding": "gzip"}), 415)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"stop": {}}, "stop", "a string or a list"),
        ({"stop": [1]}, "stop[0]", "a string"),
        ({"stop": [""]}, "stop", "non-empty"),
        ({"stop": ["a"] * 65}, "stop", "64"),
        ({"stream": "maybe"}, "stream", "true or false"),
        ({"stream": 1}, "stream", "true or false"),
        ({"temperature": "hot"}, "temperature", "a number"),
        ({"temperature": True}, "temperature", "a number"),
        ({"temperature": -1}, "temperature", "[0, 100]"),
        ({"temperature": 1e999}, "temperature", "[0, 100]"),
        ({"temperature": 10**400}, "temperature", "number"),
        ({"n": 1.5}, "n", "an integer"),
        ({"n": 10**30}, "n", ""),
        ({"n": 0}, "n", "[1, 128]"),
        ({"n": -(10**18)}, "n", ""),
        ({"seed": "x"}, "seed", "an integer"),
        ({"max_tokens": -5}, "max_tokens", ""),
        ({"max_tokens": "5"}, "max_tokens", "an integer"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "max_tokens"),
        ({"logit_bias": []}, "logit_bias", "an object"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5", "a number"),
        ({"stream_options": 5, "stream": True}, "stream_options", "an object"),
        ({"stream_options": {"include_usage": "x"}, "stream": True}, "stream_options.include_usage", "true or false"),
        ({"response_format": "json"}, "response_format", "an object"),
        ({"cache_salt": ""}, "cache_salt", ""),
        ({"priority": 2**40}, "priority", ""),
        ({"model": 5}, "model", "a string"),
        ({"top_p": -0.1}, "top_p", ""),
        ({"bad_words": "x"}, "bad_words", "a list"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
        ({"allowed_token_ids": [5000]}, "allowed_token_ids", "5000"),
        ({"request_id": 5}, "request_id", "a string"),
        ({"temprature": 0.2}, "temprature", "'temperature'"),
        ({"maxTokens": 5}, "maxTokens", "'max_tokens'"),
        ({"stream": True, "stream_options": {"include_usgae": True}}, "stream_options.include_usgae", "include_usage"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_wrong_fields_are_named_with_what_they_must_be(
    served: Served, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    """INP-20, API-06, API-11: never a 500, and the engine sees nothing of it."""
    before = len(served.engine.seen)
    full = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]} | body
    del full["messages" if path == PATHS[0] else "prompt"]
    text = json.dumps(full).replace("Infinity", "1e999")
    error = check_error(served.http.post(path, content=text), 400, param=param)
    assert words in error["message"]
    assert len(served.engine.seen) == before


def test_missing_fields_are_named(served: Served) -> None:
    assert "required" in check_error(served.complete(), 400, param="prompt")["message"]
    assert "required" in check_error(served.http.post(PATHS[1], json={}), 400, param="messages")["message"]


def test_messages_about_big_values_are_small(served: Served) -> None:
    """Item 13 of what users ask for: no answer repeats a large input."""
    big = "x" * 200_000
    for body in (
        {"prompt": "a", "stop": {"a": big}}, {"prompt": {"a": big}}, {"prompt": "a", "logit_bias": {big: 1}},
        {"prompt": "a", "temperature": big}, {"prompt": "a", big: 1}, {"prompt": "a", "model": big},
        {"prompt": "a", "request_id": big}, {"prompt": [1, big]}, {"prompt": "a", **{f"zz{i}": 1 for i in range(9999)}},
        {"prompt": "a", "n": 10**4000}, {"prompt": [10**4000]},
    ):  # fmt: skip
        response = served.complete(**body)
        assert response.status_code in (200, 400, 404) and len(response.content) < 2500
        assert sum(len(v) for v in response.headers.values()) < 4000
    response = served.chat(messages=[{"role": big, "content": "a"}])
    check_error(response, 400)


def test_unknown_fields_are_accepted_and_told(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """API-11, INP-20; a name cannot forge a header or a log line."""
    response = served.complete(prompt="a", max_tokens=1, zorp=1, **{"evil\r\nX-Evil: 1": 2, "\u00fcber": 3})
    assert response.status_code == 200 and "x-evil" not in response.headers
    assert "zorp" in response.headers[WARNING_HEADER] and "?ber" in response.headers[WARNING_HEADER]
    assert any("zorp" in record.getMessage() for record in caplog.records)
    stream = served.complete(prompt="a", max_tokens=1, zorp=1, stream=True)
    assert "zorp" in stream.headers[WARNING_HEADER]


def test_models_by_name(served: Served) -> None:
    """API-11: unknown is 404 with the name; absent means the only one."""
    for stream in (False, True):
        error = check_error(served.complete(prompt="a", model="nope", stream=stream), 404, param="model")
        assert error["code"] == "model_not_found" and "nope" in error["message"] and MODEL in error["message"]
    assert served.complete(prompt="a", max_tokens=1).json()["model"] == MODEL
    assert served.complete(prompt="a", max_tokens=1, model=None).json()["model"] == MODEL
    assert served.complete(prompt="a", max_tokens=1, model="alias").json()["model"] == "alias"
    check_error(served.complete(prompt="a", model=""), 404, param="model")


def test_unknown_routes_and_methods(served: Served) -> None:
    assert check_error(served.http.get("/v2/nothing"), 404)["code"] == "not_found"
    response = served.http.get(PATHS[0])
    assert check_error(response, 405)["code"] == "method_not_allowed" and "POST" in response.headers["allow"]


def test_ids_of_clients_are_echoed_and_never_used_inside(served: Served) -> None:
    """ABT-02, INP-23."""
    for _ in range(2):
        response = served.http.post(PATHS[0], json={"prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": "dup"})
        assert response.headers["x-request-id"] == "dup" and "dup" not in response.json()["id"]
        assert served.engine.seen[-1].client_id == "dup"
    first, second = served.engine.seen[-2:]
    assert first.request_id != second.request_id
    own = served.http.get("/version").headers["x-request-id"]
    assert len(own) == 32 and own != served.http.get("/version").headers["x-request-id"]
    odd = served.http.get("/version", headers={"X-Request-Id": "a" * 5000}).headers["x-request-id"]
    assert len(odd) == 128
    assert check_error(served.complete(model="nope", prompt=""), 404)["code"] == "model_not_found"


def test_keys_guard_every_route_but_the_probes() -> None:
    """INP-23."""
    with toy_server(server=ServerConfig(api_key=("first", "s\u00e9cond"))) as served:
        for path in ("/health", "/ping", "/ready"):
            assert served.http.get(path).status_code == 200
        for path in (
            "/v1/models",
            "/metrics",
            "/version",
            "/load",
            "/openapi.json",
            "/nothing",
            "/health/",
            "//health",
        ):
            error = check_error(served.http.get(path), 401)
            assert error["code"] == "invalid_api_key"
        for path in (*POSTS, "/reset_prefix_cache"):
            check_error(served.http.post(path, json={}), 401)
        for value in ("Bearer wrong", "Bearer", "first", "Basic first", "Bearer firs", "Bearer first2", ""):
            check_error(served.http.get("/v1/models", headers={"authorization": value}), 401)
        for value in (b"Bearer first", b"bearer first", "Bearer s\u00e9cond".encode()):
            assert served.http.get("/v1/models", headers={b"authorization": value}).status_code == 200


def test_body_limit_holds_while_reading() -> None:
    """INP-23: declared or not, a large body is refused and the connection's server lives on."""
    with toy_server(server=ServerConfig(max_request_bytes=10_000)) as served:
        big = json.dumps({"prompt": "a" * 15_000}).encode()
        check_error(served.http.post(PATHS[0], content=big), 413)
        check_error(served.http.post(PATHS[0], content=iter([big[:9000], big[9000:]])), 413)
        assert served.complete(prompt="a", max_tokens=1).status_code == 200
        check_error(served.complete(prompt="a" * 9_900), 400)  # within the limit: judged by its tokens


def test_cors_is_off_unless_asked(served: Served) -> None:
    origin = {"origin": "http://page.example"}
    assert "access-control-allow-origin" not in served.http.get("/v1/models", headers=origin).headers
    config = ServerConfig(allowed_origins=("http://page.example",), api_key=("k",))
    with toy_server(server=config) as open_server:
        ask = origin | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        preflight = open_server.http.options(PATHS[1], headers=ask)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "http://page.example"
        refused = open_server.http.get("/v1/models", headers=origin)
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "http://page.example"


def test_a_full_queue_is_an_honest_refusal() -> None:
    """OPS-10, OPS-06: 429 with Retry-After before any event, at once; n counts n."""
    with toy_server(max_waiting=4) as served, ThreadPoolExecutor(1) as pool:
        served.engine.max_running = 0  # everything waits
        waiting = pool.submit(httpx.post, served.url + PATHS[0], json={"prompt": "a", "n": 3}, timeout=10)
        assert wait_until(lambda: served.engine.num_live == 3)
        for stream in (False, True):
            started = time.monotonic()
            response = served.complete(prompt="b", n=2, stream=stream)
            error = check_error(response, 429)
            assert time.monotonic() - started < 0.5
            assert int(response.headers["retry-after"]) >= 1 and error["type"] == "rate_limit_error"
        assert served.frontend.stats.num_refused == 2
        served.engine.max_running = 100
        assert len(waiting.result().json()["choices"]) == 3


def test_more_answers_than_can_ever_wait_are_the_clients_mistake() -> None:
    """F60: 429 means 'later', and later does not help; also a batch of prompts, and for renders."""
    with toy_server(max_waiting=4) as served:
        for path in ("/v1/completions", "/v1/completions/render"):
            for body, param, words in (
                ({"prompt": "a", "n": 20}, "n", ("n is 20", "at most 4")),
                ({"prompt": ["a"] * 5}, "prompt", ("5 prompts", "at most 4")),
                ({"prompt": [[1]] * 3, "n": 2}, "prompt", ("3 prompts with n 2", "6 answers", "at most 4")),
            ):
                error = check_error(served.http.post(path, json=body), 400, param=param)
                assert all(word in error["message"] for word in (*words, "--max-waiting-requests"))
        for path in ("/v1/chat/completions", "/v1/chat/completions/render"):
            body = {"messages": [{"role": "user", "content": "hi"}], "n": 5}
            assert "at most 4" in check_error(served.http.post(path, json=body), 400, param="n")["message"]
        assert len(served.complete(prompt=["a", "b"], n=2).json()["choices"]) == 4
        assert served.frontend.stats.num_refused == 0


def test_a_request_that_fails_in_the_engine_fails_alone() -> None:
    with toy_server() as served:
        served.engine.fail_with = "this row failed"
        error = check_error(served.complete(prompt="a"), 500)
        assert error["code"] == "request_failed" and "this row failed" in error["message"]
        events = read_events(served.complete(prompt="a", stream=True).content)
        assert [e["error"]["message"] for e in events] == ["this row failed"]
        served.engine.fail_with = None
        assert served.complete(prompt="a").status_code == 200


def test_our_own_bug_is_a_500_without_its_stack(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: Any) -> Any:
        raise RuntimeError("secret detail")

    with toy_server() as served:
        served.frontend.renderer.tokens = broken  # type: ignore[method-assign]
        response = served.complete(prompt=[1])
        error = check_error(response, 500)
        assert "secret" not in response.text and error["code"] == "internal_error"
        assert any(record.exc_info for record in caplog.records)


def test_a_dead_engine_is_told_to_everybody() -> None:
    """OPS-11: running requests get an error, new ones 503, health is red."""
    with toy_server(endless, step_s=0.01, max_model_len=20_000) as served:
        body = {"prompt": "a", "max_tokens": 5000, "stream": True}
        with httpx.stream("POST", served.url + PATHS[0], json=body, timeout=10) as stream:
            raw = stream.iter_raw()
            first = next(raw)
            assert served.http.get("/ready").status_code == 200
            served.engine.kill()
            events = read_events(first + b"".join(raw))
        assert events[-1]["error"]["code"] == "engine_dead"
        assert wait_until(lambda: served.http.get("/health").status_code == 503)
        check_error(served.http.get("/ready"), 503)
        response = served.complete(prompt="a")
        assert check_error(response, 503)["type"] == "server_error" and "retry-after" in response.headers


def test_stopping_takes_no_more_and_finishes_what_runs() -> None:
    """OPS-10."""
    with toy_server(step_s=0.03) as served:
        gate = served.app.state.gate
        with httpx.stream("POST", served.url + PATHS[0], json={"prompt": "a", "stream": True}, timeout=10) as stream:
            raw = stream.iter_raw()
            first = next(raw)
            gate.stop()
            check_error(served.http.get("/ready"), 503)
            assert served.http.get("/health").status_code == 200
            response = served.complete(prompt="b")
            assert check_error(response, 503)["code"] == "server_stopping" and "retry-after" in response.headers
            events = read_events(first + b"".join(raw))
        assert events[-1] == "[DONE]"
        assert wait_until(lambda: gate.num_active == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_ends_says_so_in_band(stream: bool) -> None:
    """OPS-03, item 20: the grace time is over, nobody is hung up on in silence."""
    with toy_server(endless, step_s=0.02, max_model_len=20_000) as served:
        sock = _connect(served.url)
        sock.sendall(_request({"prompt": "a", "max_tokens": 5000, "stream": stream}))
        assert wait_until(lambda: served.engine.num_live == 1)
    sock.settimeout(5)
    received = b""
    while chunk := sock.recv(65536):
        received += chunk
    sock.close()
    assert b"server is stopping" in received
    assert (b"503" in received.split(b"\r\n")[0]) is not stream


def _connect(url: str) -> socket.socket:
    where = urlparse(url)
    return socket.create_connection((where.hostname, where.port))


def _request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data
