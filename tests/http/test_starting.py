"""The port of a server that starts: everybody is answered, nobody is refused, nobody holds up another (F69)."""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from octavo.base.phases import Now
from octavo.entrypoints.commands.serve import bind
from octavo.http import starting
from octavo.http.starting import StartingPort, response

NOW = Now("loading weights", 3.06, 4.0)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with contextlib.closing(bind("127.0.0.1", 0)) as listener:
        yield listener


def connect(listener: socket.socket) -> socket.socket:
    return socket.create_connection(listener.getsockname()[:2], timeout=20)


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/health"), ("GET", "/ready"), ("POST", "/v1/chat/completions"), ("GET", "/nothing"), ("HEAD", "/")],
)
def test_every_path_says_that_the_server_starts_and_with_what_it_is_busy(listener, method, path):
    with StartingPort(listener, lambda: NOW):
        connection = http.client.HTTPConnection(*listener.getsockname()[:2], timeout=20)
        connection.request(method, path, body=b'{"prompt": "x"}' if method == "POST" else None)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
    assert answer.status == 503
    assert answer.getheader("Retry-After") == "1" and answer.getheader("X-Request-Id")
    if method == "HEAD":
        assert body == b""
        return
    told = json.loads(body)
    assert told["error"] == {
        "message": "the server is starting: loading weights, 3.1 s so far (4.0 s in all); "
        "send the request again when it is ready",
        "type": "server_error",
        "param": None,
        "code": "starting",
    }
    assert (told["status"], told["alive"], told["ready"], told["phase"]) == ("starting", True, False, "loading weights")


def test_who_says_nothing_or_sends_much_holds_up_nobody(listener):
    with StartingPort(listener, lambda: NOW):
        silent = [connect(listener) for _ in range(20)]
        large = connect(listener)
        large.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 4000000\r\n\r\n")
        large.sendall(b"x" * 4_000_000)  # read and thrown away: the answer arrives whole
        with connect(listener) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert read_all(plain).startswith(b"HTTP/1.1 503 ")
        assert read_all(large).startswith(b"HTTP/1.1 503 ")
        for one in (large, *silent):
            one.close()


def test_visitors_are_bounded_and_a_slow_one_is_let_go(listener, monkeypatch):
    monkeypatch.setattr(starting, "MAX_VISITORS", 4)
    monkeypatch.setattr(starting, "HEAD_S", 0.3)
    with StartingPort(listener, lambda: NOW):
        first, *others = [connect(listener) for _ in range(8)]
        assert read_all(first) == b""
        for one in (first, *others):
            assert read_all(one) == b"", "closed in time, without an answer to what was not asked"
            one.close()


def test_the_port_is_handed_over_and_nobody_is_refused_or_lost(listener):
    """Many clients ask without end while the socket changes hands: each gets the old answer or the new one."""
    got: list[bytes] = []
    wrong: list[Exception] = []
    end, idle = threading.Event(), threading.Event()

    def ask() -> None:
        while not end.is_set():
            try:
                with connect(listener) as one:
                    one.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    got.append(read_all(one)[:12])
            except OSError as error:
                wrong.append(error)

    def serve() -> None:
        listener.settimeout(0.1)
        while not idle.is_set():
            with contextlib.suppress(TimeoutError):
                one, _ = listener.accept()
                one.settimeout(20)
                one.recv(1000)
                one.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                one.close()

    clients = [threading.Thread(target=ask) for _ in range(4)]
    with StartingPort(listener, lambda: NOW) as port:
        early = connect(listener)  # accepted before, asks after
        for one in clients:
            one.start()
        until(lambda: len(got) >= 20)
        port.hand_over()
        num_old = len(got)
        server = threading.Thread(target=serve)
        server.start()
        until(lambda: got.count(b"HTTP/1.1 200") >= 20)
        early.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert read_all(early).startswith(b"HTTP/1.1 503 ")
        early.close()
    until(lambda: got.count(b"HTTP/1.1 200") >= 40)  # the port stays open when the one before has left
    end.set()
    for one in clients:
        one.join(20)
    idle.set()
    server.join(20)
    assert wrong == []
    assert set(got) == {b"HTTP/1.1 503", b"HTTP/1.1 200"}
    assert b"HTTP/1.1 503" not in got[num_old + len(clients) :]


def until(done) -> None:
    end_s = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_two_that_start_on_one_port_are_not_both_let_in():
    """Before, the second was told only when it had loaded its weights."""
    with contextlib.closing(bind("127.0.0.1", 0)) as listener, pytest.raises(Exception, match="is in use"):
        bind("127.0.0.1", listener.getsockname()[1])


def test_an_answer_is_small_enough_for_one_write():
    assert len(response(Now("x" * 100, 1.0, 1e6))) < 2000
