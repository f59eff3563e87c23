"""Heads and bodies that never end, and clients that say nothing (F82)."""

import json
import socket
import time

import pytest

from octavo.config.schema import ServerConfig
from octavo.http import body, connection
from octavo.http.connection import MAX_HEAD_BYTES, MAX_HEADERS
from tests.entrypoints.http.toy import endless
from tests.entrypoints.http.toy_server import Served, toy_server
from tests.support.routed import routed

START = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"


def talk(url: str, *pieces: bytes, pause_s: float = 0.0, timeout_s: float = 20.0) -> bytes:
    """Send the pieces, and read until the server closes."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=timeout_s) as client:
        told = b""
        try:
            for piece in pieces:
                client.sendall(piece)
                time.sleep(pause_s)
        except OSError:  # closed while we were sending
            pass
        try:
            while chunk := client.recv(65536):
                told += chunk
        except ConnectionResetError:  # what the server had not read yet is lost with it
            pass
        return told


def check_refused(told: bytes, status: int) -> None:
    head, _, text = told.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), told[:200]
    assert b"connection: close" in head.lower()
    assert json.loads(text)["error"]["message"]


def test_a_head_that_never_ends_is_refused_at_the_limit(served: Served) -> None:
    """F82: 431, whether one header is endless, the path is, or there are too many."""
    check_refused(talk(served.url, START + b"x-a: " + b"a" * (MAX_HEAD_BYTES - len(START) - 5)), 431)
    check_refused(talk(served.url, b"GET /" + b"a" * (MAX_HEAD_BYTES - 5)), 431)
    many = b"".join(b"x-%d: 1\r\n" % i for i in range(MAX_HEADERS + 5))
    check_refused(talk(served.url, START + many), 431)
    slowly = [START, *[b"x-a: " + b"b" * 1000 + b"\r\n"] * 70]
    assert talk(served.url, *slowly, pause_s=0.001)[:12] in (b"HTTP/1.1 431", b"")  # the answer may be lost in a reset
    assert served.complete(prompt="a", max_tokens=1).status_code == 200


def test_what_is_no_http_hears_so_in_the_shape_of_all_errors(served: Served) -> None:
    """F82: also TLS on a port that speaks none."""
    for what in (b"\x16\x03\x01\x02\x00\x01\x00\x01", b"hello\r\n\r\n", START + b"content-length: -1\r\n\r\n"):
        check_refused(talk(served.url, what), 400)


@pytest.mark.parametrize("case", [b"Upgrade: h2c", b"upgrade:h2c", b"UPGRADE:\th2c"])
@pytest.mark.parametrize("apart", [False, True])
def test_an_offer_to_speak_http2_does_not_cost_the_body(served: Served, case: bytes, apart: bool) -> None:
    """F82's door: Java's HTTP client offers h2c with every request to a http:// address; the answer is HTTP/1.1's."""
    body = json.dumps({"prompt": "a\r\nUpgrade: b", "max_tokens": 1}).encode()
    head = START + b"connection: Upgrade, HTTP2-Settings\r\n" + case + b"\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
    head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    closing = b"GET /version HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    told = talk(served.url, *((head, body, closing) if apart else (head + body + closing,)), pause_s=0.05)
    assert told.count(b"HTTP/1.1 200 OK") == 2, told


def test_a_length_of_many_digits_is_a_length(served: Served) -> None:
    """F81's kind: a number too long for Python's int() is no 500."""
    body = b'{"prompt":"a","max_tokens":1}'
    head = START + b"connection: close\r\ncontent-length: " + b"0" * 5000 + b"%d\r\n\r\n" % len(body)
    assert talk(served.url, head + body).startswith(b"HTTP/1.1 200 ")


def test_no_more_than_the_limit_is_taken_of_an_endless_head(served: Served) -> None:
    """F82: the server closes long before 200 MB."""
    host, port = served.url.removeprefix("http://").split(":")
    sent = 0
    with socket.create_connection((host, int(port)), timeout=20) as client, pytest.raises(OSError):
        client.sendall(START + b"x-a: ")
        while sent < 200 << 20:
            sent += client.send(b"a" * 65536)
    assert sent < 50 << 20


def test_a_large_head_within_the_limit_is_read(served: Served) -> None:
    answer = served.http.get("/v1/models", headers={"x-large": "a" * (MAX_HEAD_BYTES - 4096)})
    assert answer.status_code == 200


def test_requests_one_after_the_other_on_one_connection_are_all_answered(served: Served) -> None:
    """Many small ones in one piece are no large head."""
    one = b"GET /health HTTP/1.1\r\nhost: a\r\nx-pad: " + b"a" * 900 + b"\r\n\r\n"
    last = one.replace(b"host: a", b"host: a\r\nconnection: close")
    told = talk(served.url, one * 150 + last)
    assert told.count(b'{"status":"ok"}') == 151


def test_slow_heads_and_silent_clients_are_closed(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    """F82: 408 for a head that does not end; who says nothing is closed without a word."""
    monkeypatch.setattr(connection, "HEAD_S", 0.3)
    check_refused(talk(served.url, START), 408)
    trickled = talk(served.url, *[bytes([b]) for b in START], pause_s=0.02)
    assert trickled[:12] in (b"HTTP/1.1 408", b"")
    assert talk(served.url) == b""


def test_bodies_that_trickle_are_cut(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    """F82: many slow senders at once: each gets 408 in time, and others are served meanwhile."""
    monkeypatch.setattr(body, "GRACE_S", 0.5)
    host, port = served.url.removeprefix("http://").split(":")
    clients = [socket.create_connection((host, int(port)), timeout=20) for _ in range(50)]
    try:
        for client in clients:
            client.sendall(START + b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{")
        for _ in range(3):
            time.sleep(0.1)
            assert served.complete(prompt="a", max_tokens=1).status_code == 200
            for client in clients:
                client.sendall(b" ")
        for client in clients:
            told = b""
            while chunk := client.recv(65536):
                told += chunk
            check_refused(told, 408)
    finally:
        for client in clients:
            client.close()


def test_a_steady_body_may_take_its_time(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    """F82: only who is slower than the least rate is cut."""
    monkeypatch.setattr(body, "GRACE_S", 1.0)
    monkeypatch.setattr(body, "LEAST_BYTES_PER_S", 10_000)
    text = json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * 60_000}).encode()
    head = START + b"connection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text)
    pieces = [text[at : at + 3000] for at in range(0, len(text), 3000)]
    assert talk(served.url, head, *pieces, pause_s=0.1).startswith(b"HTTP/1.1 200")


def test_a_body_that_nobody_reads_ends_soon_after_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """F82: an answer given before the body came (no key, no such route) does not leave the connection open."""
    monkeypatch.setattr(connection, "UNREAD_BODY_S", 0.2)
    with toy_server(server=ServerConfig(api_key=("k",))) as served:
        begun = time.monotonic()
        told = talk(served.url, START + b"content-length: 1000\r\n\r\n", b"{", timeout_s=10)
        assert told.startswith(b"HTTP/1.1 401") and time.monotonic() - begun < 8


def test_bytes_behind_a_request_do_not_end_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    text = json.dumps({"prompt": "a", "max_tokens": 100, "stream": True}).encode()
    head = START + b"connection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text)
    with toy_server(endless, step_s=0.01) as served:
        assert b"[DONE]" in talk(served.url, head + text, b"\r\n")


def test_the_routers_door_has_the_same_bounds(served: Served) -> None:
    """F82, F81."""
    with routed(plain=[served]) as router:
        check_refused(talk(router.url, START + b"x-a: " + b"a" * (MAX_HEAD_BYTES - len(START) - 5)), 431)
        for deep in ("[" * 600 + "]" * 600, '{"a":' * 600 + "1" + "}" * 600):
            text = '{"prompt": "a", "x": ' + deep + "}"
            answer = router.http.post("/v1/completions", content=text, headers={"content-type": "application/json"})
            assert answer.status_code == 400 and "nested too deeply" in answer.text
