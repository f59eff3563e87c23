"""Streams and clients that leave: over real sockets, half-closed and reset ones included (ABT-01, ABT-02, MET-01)."""

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlparse

import httpx
import pytest

from octavo.base.errors import RequestFailed
from octavo.config.schema import ServerConfig
from octavo.http.errors import ClientGone, ErrorBody, ErrorDetail, ServerStopping
from octavo.http.gate import Gate
from octavo.http.sse import DONE, KEEP_ALIVE, EventStream, frame, until_gone
from tests.entrypoints.http.events import read_events, text_stream
from tests.entrypoints.http.toy import endless
from tests.entrypoints.http.toy_server import Served, toy_server
from tests.support.http_server import wait_until

LONG = {"prompt": "a", "max_tokens": 5000, "ignore_eos": True}


@pytest.fixture(scope="module")
def slow() -> Iterator[Served]:
    with toy_server(endless, step_s=0.005, max_model_len=20_000, max_waiting=500) as served:
        yield served


def send(served: Served, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
    where = urlparse(served.url)
    sock = socket.create_connection((where.hostname, where.port), timeout=5)
    data = json.dumps(body).encode()
    sock.sendall(f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return sock


def close(sock: socket.socket) -> None:
    sock.close()


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def half_close(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)


def is_idle(served: Served) -> bool:
    stats = served.http.get("/load").json()
    return served.engine.num_live == 0 and stats["running"] == stats["waiting"] == stats["requests"] == 0


@pytest.mark.parametrize("leave", [close, reset, half_close])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_leaves_stops_its_work(
    slow: Served, leave: Callable[[socket.socket], None], stream: bool, n: int
) -> None:
    """ABT-01 (a), (b), (e), (g)."""
    with closing(send(slow, LONG | {"stream": stream, "n": n})) as sock:
        assert wait_until(lambda: slow.engine.num_live == n)
        if stream:
            assert b"200 OK" in sock.recv(4096)
        leave(sock)
        assert wait_until(lambda: is_idle(slow), 2.0)
    made = slow.engine.num_tokens
    time.sleep(0.03)
    assert slow.engine.num_tokens == made
    assert slow.complete(prompt="next", max_tokens=2).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_queued(slow: Served, stream: bool) -> None:
    """ABT-01 (c)."""
    slow.engine.max_running = 0
    try:
        with closing(send(slow, LONG | {"stream": stream})) as sock:
            assert wait_until(lambda: slow.engine.num_live == 1)
            sock.close()
            assert wait_until(lambda: is_idle(slow), 2.0)
    finally:
        slow.engine.max_running = 100


def test_many_leave_at_once(slow: Served) -> None:
    """ABT-01 (f), MET-01: gauges fall to zero without new traffic."""
    socks = [send(slow, LONG | {"stream": i % 2 == 0}) for i in range(60)]
    assert wait_until(lambda: slow.engine.num_live == 60)
    for sock in socks:
        reset(sock)
    assert wait_until(lambda: is_idle(slow), 3.0)
    text = slow.http.get("/metrics").text
    assert 'octavo_requests_running{engine="0",model="toy/model"} 0.0' in text


def test_a_batch_of_prompts_is_aborted_as_a_whole(slow: Served) -> None:
    for stream in (False, True):
        with closing(send(slow, LONG | {"prompt": ["a", "b", "c"], "stream": stream})) as sock:
            assert wait_until(lambda: slow.engine.num_live == 3)
            sock.close()
            assert wait_until(lambda: is_idle(slow), 2.0)


def test_one_id_used_again_and_again(slow: Served) -> None:
    """ABT-02: an abort that comes late hits nobody else."""
    for i in range(40):
        prompt = f"p{i}"
        with closing(send(slow, LONG | {"prompt": prompt, "request_id": "dup", "stream": True})) as sock:
            sock.recv(1024)
        answer = slow.complete(prompt=prompt, request_id="dup", max_tokens=2)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2
    assert wait_until(lambda: is_idle(slow), 2.0)


def test_long_silence_is_filled_with_comments() -> None:
    with toy_server(step_s=0.0, server=ServerConfig(stream_keep_alive_s=0.1)) as served:
        served.engine.max_running = 0
        raw = b""
        with httpx.stream("POST", f"{served.url}/v1/completions", json={"prompt": "a", "stream": True}) as response:
            for chunk in response.iter_raw():
                raw += chunk
                if raw.count(KEEP_ALIVE) == 2:
                    served.engine.max_running = 10
        assert raw.startswith(KEEP_ALIVE * 2)
        assert read_events(raw)[-1] == "[DONE]"
        assert "comment" not in text_stream(served.complete(prompt="a", stream=True)).texts[0]


# ---- the pieces by themselves -------------------------------------------------------------------

MESSAGE = ErrorBody(ErrorDetail("line", "kind"))


class Wire:
    """An ASGI connection in memory; `leave()` is the client closing it."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self._left = asyncio.Event()

    def leave(self) -> None:
        self._left.set()

    async def receive(self) -> dict[str, Any]:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(m["body"] for m in self.sent[1:])


class Source:
    """Frames, then an error or a wait for ever."""

    def __init__(self, frames: list[bytes], error: Exception | None = None, *, hang: bool = False) -> None:
        self.frames = frames
        self.error = error
        self.hang = hang
        self.closed = 0
        self.generator_closed = False

    async def run(self) -> AsyncGenerator[bytes, None]:
        try:
            for each in self.frames:
                yield each
            if self.hang:
                await asyncio.Event().wait()
            if self.error is not None:
                raise self.error
        finally:
            self.generator_closed = True

    async def close(self) -> None:
        self.closed += 1

    def response(self, gate: Gate, keep_alive_s: float = 10.0) -> EventStream:
        return EventStream(self.run(), self.close, gate=gate, ticket=gate.enter(), keep_alive_s=keep_alive_s)


def test_no_client_takes_a_character_of_a_frame_for_a_line_s_end() -> None:
    text = "".join(map(chr, range(1, 0x100))) + "\u2028\u2029é日🤖"
    data = frame(ErrorBody(ErrorDetail(text, "server_error")))
    lines = data.decode().splitlines()
    assert len(lines) == 2 and lines[1] == ""
    assert json.loads(lines[0][6:])["error"]["message"] == text


def test_frames_are_json_on_one_line() -> None:
    detail = ErrorDetail("two\nlines \u2028 \U0001f600", "kind")
    data = frame(ErrorBody(detail))
    assert data.startswith(b"data: {") and data.endswith(b"}\n\n") and data.count(b"\n") == 2
    assert json.loads(data[6:])["error"]["message"] == detail.message


def test_a_stream_that_ends_closes_everything() -> None:
    async def main() -> None:
        gate, wire, source = Gate(), Wire(), Source([frame(MESSAGE), DONE])
        await source.response(gate)({}, wire.receive, wire.send)
        assert wire.body == frame(MESSAGE) + DONE
        assert wire.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
        headers = dict(wire.sent[0]["headers"])
        assert headers[b"content-type"].startswith(b"text/event-stream") and b"content-length" not in headers
        assert headers[b"cache-control"] == b"no-cache"
        assert source.closed == 1 and gate.num_active == 0

    asyncio.run(main())


@pytest.mark.parametrize("error", [RequestFailed("row 3"), RuntimeError("secret")])
def test_an_error_in_a_stream_is_one_event_and_the_end(error: Exception) -> None:
    async def main() -> None:
        gate, wire, source = Gate(), Wire(), Source([frame(MESSAGE)], error)
        await source.response(gate)({}, wire.receive, wire.send)
        events = read_events(wire.body)
        assert len(events) == 2 and set(events[1]["error"]) == {"message", "type", "param", "code"}
        assert "secret" not in str(events) and not wire.sent[-1]["more_body"]
        assert source.closed == 1 and source.generator_closed and gate.num_active == 0

    asyncio.run(main())


def test_a_client_that_leaves_ends_the_stream() -> None:
    async def main() -> None:
        gate, wire, source = Gate(), Wire(), Source([frame(MESSAGE)], hang=True)
        task = asyncio.create_task(source.response(gate)({}, wire.receive, wire.send))
        await asyncio.sleep(0.01)
        wire.leave()
        await asyncio.wait_for(task, 1)
        assert source.closed == 1 and source.generator_closed and gate.num_active == 0

    asyncio.run(main())


@pytest.mark.parametrize("how", ["cut", "cancel"])
def test_the_end_of_the_servers_time_is_told_in_band(how: str) -> None:
    """OPS-10."""

    async def main() -> None:
        gate, wire, source = Gate(), Wire(), Source([frame(MESSAGE)], hang=True)
        task = asyncio.create_task(source.response(gate)({}, wire.receive, wire.send))
        await asyncio.sleep(0.01)
        if how == "cut":
            assert gate.cut() == 1
        else:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert read_events(wire.body)[-1]["error"]["code"] == "server_stopping"
        assert source.closed == 1 and gate.num_active == 0

    asyncio.run(main())


def test_a_stalled_reader_gets_no_comments_in_between() -> None:
    async def main() -> None:
        gate, wire, source = Gate(), Wire(), Source([frame(MESSAGE), DONE])
        free = asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body" and message["body"]:
                assert message["body"] != KEEP_ALIVE
                await asyncio.wait_for(free.wait(), 1)
            await wire.send(message)

        task = asyncio.create_task(source.response(gate, keep_alive_s=0.02)({}, wire.receive, send))
        await asyncio.sleep(0.1)
        free.set()
        await task
        assert wire.body == frame(MESSAGE) + DONE

    asyncio.run(main())


def test_plain_work_ends_with_its_result_the_client_or_the_server() -> None:
    async def work(result: str | Exception | None) -> str:
        if result is None:
            await asyncio.Event().wait()
        if isinstance(result, Exception):
            raise result
        return str(result)

    async def main() -> None:
        gate, wire = Gate(), Wire()
        assert await until_gone(wire.receive, gate.enter(), work("done")) == "done"
        with pytest.raises(RequestFailed):
            await until_gone(wire.receive, gate.enter(), work(RequestFailed("x")))
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, gate.cut)
        with pytest.raises(ServerStopping):
            await until_gone(wire.receive, gate.enter(), work(None))
        loop.call_later(0.01, wire.leave)
        with pytest.raises(ClientGone):
            await until_gone(wire.receive, gate.enter(), work(None))

    asyncio.run(main())
