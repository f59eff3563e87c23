"""Servers behind a router that say what is no answer: others are asked, and nothing of it stays (PDX-12)."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from octavo.features.router import relay, upstream
from octavo.features.router.relay import EventSplitter
from tests.support.fake_instance import FakeInstance
from tests.support.routed import routed

DEEP = b'{"error": {"code": ' + b"[" * 50_000 + b"]" * 50_000 + b"}}"


def said(status: str = "200 OK", body: bytes = b"{}", content_type: str = "application/json", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


class Speaker:
    """A listener that says the same to everybody. Owns: what it was asked."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.url = f"http://{self.host}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # until it is closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(20)
            self.asked.append(connection.recv(65536))
            connection.sendall(self.data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextlib.contextmanager
def speaking(data: bytes) -> Iterator[Speaker]:
    made = Speaker(data)
    try:
        yield made
    finally:
        made.close()


NO_ANSWERS = {
    "noise": b"\x00\xff\r\n" * 100,
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n",
    "a status of three digits that HTTP does not know": said("999 Denied"),
    "a change of protocols": b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n",
    "a type beyond Latin-1": said(content_type="text/plain; x=€"),
    "a warning with control characters": said(more="X-Octavo-Warning: a\x01b\r\n"),
    "503 and deep JSON": said("503 Busy", DEEP),
    "503, deep JSON and when to come again": said("503 Busy", DEEP, more="Retry-After: 3\r\n"),
    "a stream without an event": said(body=b"", content_type="text/event-stream"),
    "compressed nonsense": said(body=b"nonsense", more="Content-Encoding: gzip\r\n"),
}


@pytest.mark.parametrize("data", NO_ANSWERS.values(), ids=NO_ANSWERS)
def test_what_is_no_answer_is_asked_of_another_server(data: bytes) -> None:
    """A router that starts beside such a server works, and no client sees a 500 or a broken connection."""
    with speaking(data) as bad, FakeInstance("good") as good, routed(plain=[bad, good]) as router:
        for _ in range(4):
            router.router.fleet[bad.host].health.passed()  # its checks may be better than its answers
            answer = router.complete(prompt="hello", max_tokens=4)
            assert answer.status_code == 200 and answer.headers["x-octavo-instance"] == good.host
        assert any(b"/v1/completions" in asked for asked in bad.asked) or b"Retry-After" in data
        assert router.http.get("/v1/models").json()["data"][0]["by"] == "good"


def test_deep_json_from_a_prefill_server_makes_the_request_go_whole() -> None:
    with speaking(said(body=DEEP)) as bad, FakeInstance("good") as good, routed(prefill=[bad], decode=[good]) as router:
        answer = router.complete(prompt="a long prompt " * 100, max_tokens=4)
        assert answer.status_code == 200 and answer.headers["x-octavo-instance"] == good.host
        assert any(b"/v1/completions" in asked for asked in bad.asked)


@pytest.mark.parametrize("cookie", ["session=secret; Path=/", "a=\xff"])
def test_what_a_server_sets_for_one_client_reaches_no_other_request(cookie: str) -> None:
    """Cookies know no ports: one server's were sent to all on its host, and one beyond ASCII ended every request."""
    with (
        speaking(said(body=b'{"id": "x"}', more=f"Set-Cookie: {cookie}\r\n")) as one,
        speaking(said(body=b'{"id": "y"}')) as two,
        routed(plain=[one, two]) as router,
    ):
        for _ in range(4):
            assert router.complete(prompt="hello", max_tokens=4).status_code == 200
        assert not any(b"cookie" in asked.lower() for asked in one.asked + two.asked)


def test_an_answer_without_end_is_asked_of_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """F80: what is kept until it is whole is bounded."""
    monkeypatch.setattr(upstream, "MAX_ANSWER_BYTES", 100_000)
    endless = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n" + b" " * 200_000
    with speaking(endless) as bad, FakeInstance("good") as good, routed(plain=[bad, good]) as router:
        for _ in range(4):
            router.router.fleet[bad.host].health.passed()
            answer = router.complete(prompt="hello", max_tokens=4)
            assert answer.status_code == 200 and answer.headers["x-octavo-instance"] == good.host
        assert any(b"/v1/completions" in asked for asked in bad.asked)


def test_an_event_without_end_is_a_break_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """F80: and the events before it have come."""
    monkeypatch.setattr(relay, "MAX_EVENT_BYTES", 100_000)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    with speaking(head + b'data: {"id": "x"}\n\ndata: ' + b"x" * 300_000) as bad, routed(plain=[bad]) as router:
        router.router.fleet[bad.host].health.passed()
        first, last = router.stream(prompt="hello", max_tokens=4)
        assert first == {"id": "x"} and "larger than 100000 bytes" in last["error"]["message"]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 100])
def test_a_stream_is_cut_at_its_events_however_it_comes(end: bytes, size: int) -> None:
    texts = [b"data: 1", b"data: two\ndata: and a half", b": a comment", b"data: [DONE]"]
    stream, cut, given = end.join(texts) + end, EventSplitter(), b""
    for start in range(0, len(stream), size):
        whole = cut.feed(stream[start : start + size])
        assert not whole or whole.endswith(end)
        given += whole
    assert given == stream and not cut.rest
