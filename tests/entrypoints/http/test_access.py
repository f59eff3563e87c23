"""A line in the log for each request, and nothing in it that does not belong there (F53, OPS-3)."""

import logging
import re
import socket

import pytest

from octavo.config.schema import ServerConfig
from tests.entrypoints.http.toy import endless
from tests.entrypoints.http.toy_server import Served, toy_server
from tests.support.http_server import wait_until
from tests.support.routed import routed

LOGGER = "octavo.http.access"
SECRETS = ("sk-secret", "what only the user knows", "q=hidden")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "octavo")
    return caplog


def told(caplog: pytest.LogCaptureFixture, count: int) -> list[logging.LogRecord]:
    """The lines, once there are so many: they come after the client has its answer."""

    def found() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name == LOGGER]

    assert wait_until(lambda: len(found()) >= count), caplog.text
    assert len(found()) == count
    return found()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_line_with_what_it_cost(served: Served, lines: pytest.LogCaptureFixture, stream: bool) -> None:
    """F53: id, client, route, status, tokens, time to first token, duration; level info."""
    body = {"prompt": ["hi", "you"], "n": 2, "max_tokens": 3, "stream": stream}
    served.http.post("/v1/completions?q=hidden", json=body, headers={"x-request-id": "mine-7"})
    (record,) = told(lines, 1)
    assert record.levelno == logging.INFO
    assert re.fullmatch(
        r'mine-7 127\.0\.0\.1:\d+ "POST /v1/completions" 200 prompt 5, completion 12, first token \d\.\d{3} s, \d\.\d{3} s',
        record.getMessage(),
    )


def test_refusals_have_a_line_too(lines: pytest.LogCaptureFixture) -> None:
    """F53: a wrong field, a wrong key, a route that is not there; never a key, a query or a content."""
    with toy_server(server=ServerConfig(api_key=("sk-secret",))) as served:
        key = {"authorization": "Bearer sk-secret"}
        served.http.post("/v1/completions?api_key=sk-secret", json={"prompt": SECRETS[1], "top_p": 7}, headers=key)
        served.http.post("/v1/completions?q=hidden", json={"prompt": SECRETS[1]})
        served.http.get("/nowhere?q=hidden", headers=key)
        messages = [record.getMessage() for record in told(lines, 3)]
    assert [re.search(r'"(\S+ \S+)" (\d+)', message).groups() for message in messages] == [
        ("POST /v1/completions", "400"), ("POST /v1/completions", "401"), ("GET /nowhere", "404"),
    ]  # fmt: skip
    assert not [secret for secret in SECRETS if secret in lines.text]


def test_probes_are_told_to_those_who_debug_and_fail_in_silence(lines: pytest.LogCaptureFixture) -> None:
    """F53: a probe that is answered 503 is no ERROR."""
    with toy_server() as served:
        served.app.state.gate.stop()
        for path in ("/health", "/ping", "/metrics", "/ready"):
            served.http.get(path)
        records = told(lines, 4)
        assert " 503 " in records[3].getMessage()
        assert {record.levelno for record in records} == {logging.DEBUG}
        served.engine.kill()
        assert wait_until(lambda: served.http.get("/health").status_code == 503)
    assert not [r for r in lines.records if r.levelno >= logging.WARNING and "/health" in r.getMessage()]


def test_it_can_be_turned_off(lines: pytest.LogCaptureFixture) -> None:
    """F53: --disable-access-log does."""
    with toy_server(server=ServerConfig(disable_access_log=True)) as served:
        served.complete(prompt="a", max_tokens=1)
        served.http.get("/health")
    assert not [record for record in lines.records if record.name == LOGGER]


def test_nobody_forges_a_line(served: Served, lines: pytest.LogCaptureFixture) -> None:
    """F53: control characters, quotes and spaces in paths and ids stay within their place."""
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(
            b'GET /a%0d%0ab"%20200 HTTP/1.1\r\nhost: a\r\nx-request-id: x" 200 forged\r\nconnection: close\r\n\r\n'
        )
        while client.recv(65536):
            pass
    (record,) = told(lines, 1)
    assert re.fullmatch(
        r"""'x" 200 forged' 127\.0\.0\.1:\d+ "GET /a%0d%0ab%22%20200" 404 first byte \d\.\d{3} s, \d\.\d{3} s""",
        record.getMessage(),
    )


def test_a_client_that_leaves_before_the_answer_is_499(lines: pytest.LogCaptureFixture) -> None:
    with toy_server(endless, step_s=0.01) as served:
        host, port = served.url.removeprefix("http://").split(":")
        body = b'{"prompt": "a", "max_tokens": 200}'
        with socket.create_connection((host, int(port)), timeout=10) as client:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            client.sendall(head % len(body) + body)
            assert wait_until(lambda: served.engine.num_live == 1)
        (record,) = told(lines, 1)
    assert '"POST /v1/completions" 499' in record.getMessage()


def test_the_router_has_the_same_lines(served: Served, lines: pytest.LogCaptureFixture) -> None:
    """F53."""
    with routed(plain=[served]) as router:
        lines.clear()
        router.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers={"x-request-id": "r1"})
        assert wait_until(lambda: lines.text.count('"POST /v1/completions" 200') == 2)
    records = [r.getMessage() for r in lines.records if r.name == LOGGER and r.getMessage().startswith("r1 ")]
    assert sorted("prompt 1, completion 2" in line for line in records) == [False, True]
    assert all(" first " in line for line in records)
