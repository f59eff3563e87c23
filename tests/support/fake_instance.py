"""A server behind a router: the engine's HTTP API by the letter, no model, and every way to fail.

Promises: it listens on a real socket of 127.0.0.1; each generating request takes the next behaviour that was set, and
answers well when there is none; `stop` ends it as the death of a process would, `start` brings it back on its port.
Does not know: the router.

A streamed answer has one event for each word of `words`; a word tells who said it.
"""

import json
import queue
import socket
import struct
import threading
from collections import deque
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from octavo.http.sse import frame
from octavo.kvcache.published import Note

PATIENCE_S = 20.0


@dataclass(frozen=True)
class Asked:
    """A request that came."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]


class _Reset(Exception):
    """The connection is to be reset."""


class _Handler(BaseHTTPRequestHandler):
    """Answers as the instance says."""

    protocol_version = "HTTP/1.1"
    instance: "FakeInstance"

    def do_GET(self):
        me = self.instance
        if self.path == "/health" or (self.path == "/ready" and me.knows_ready):
            if me.health == "freeze":
                me.released.wait(PATIENCE_S)
                raise _Reset
            if me.health in ("engine_silent", "starting"):  # by the letter of the engine's own server
                more = {"Retry-After": "1"} if me.health == "starting" else {}
                self._whole(503, _error(f"it is {me.health}", me.health), more)
                return
            headers = {"Retry-After": "5"} if me.health == "draining" else {}
            status = {"ok": 200, "draining": 503}.get(me.health, 500)
            self._whole(status, {"status": me.health}, headers)
        elif self.path == "/v1/models":
            card = {"id": "fake", "by": me.name, **({"max_model_len": me.length} if me.length else {})}
            self._whole(200, {"object": "list", "data": [card]})
        elif self.path == "/v1/kv/events" and me.notes is not None:
            me.followed_with.append(self.headers.get("Authorization"))
            self._follow(me.notes)
        else:
            self._whole(404, {"error": {"message": "no such route", "type": "x", "param": None, "code": "not_found"}})

    def do_POST(self):
        me = self.instance
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        me.asked.append(Asked(self.path, body, {k.lower(): v for k, v in self.headers.items()}))
        if self.path.endswith("/render"):
            prompt = body.get("prompt") or "".join(m["content"] for m in body["messages"])
            ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
            self._whole(200, {"prompts": [{"prompt": prompt, "prompt_token_ids": ids, "num_prompt_tokens": len(ids)}]})
            return
        behaviour = me.behaviours.popleft() if me.behaviours else "well"
        if isinstance(behaviour, int):
            self._whole(behaviour, _error(f"{me.name} says {behaviour}", "some_code"))
        elif behaviour == "draining":
            self._whole(503, _error("stopping", "server_stopping"), {"Retry-After": "5"})
        elif behaviour == "reset":
            raise _Reset
        elif behaviour == "freeze":
            me.released.wait(PATIENCE_S)
            raise _Reset
        elif behaviour == "babble":
            self.wfile.write(b"this is not HTTP at all\r\n\r\n")
            self.close_connection = True
        elif behaviour == "not json":
            self._raw(200, b"well, no", "application/json")
        elif body.get("stream"):
            self._stream(behaviour)
        else:
            self._answer(body, behaviour)

    def _answer(self, body, behaviour):
        me = self.instance
        answer = {"id": "x", "choices": [{"index": 0, "text": " ".join(me.said()), "finish_reason": "stop"}]}
        asks = (body.get("kv_transfer_params") or {}).get("do_remote_decode")
        if asks and behaviour != "no params":
            answer["kv_transfer_params"] = {"lease": f"{me.name}-{len(me.asked)}", "host": "127.0.0.1", "port": 7}
        self._whole(200, answer)

    def _stream(self, behaviour):
        me = self.instance
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if behaviour == "reset before the first byte":
            raise _Reset
        for place, word in enumerate(me.said()):
            if place == 1 and behaviour == "freeze in the stream":
                me.released.wait(PATIENCE_S)
            if place == 1 and behaviour == "reset in an event":
                self._chunk(b'data: {"choices": [{"index": 0, "te')
            if place == 1 and str(behaviour).startswith("reset in"):
                me.released.wait(PATIENCE_S)
                raise _Reset
            if place == 1 and behaviour == "split an event":
                data = _event(word)
                for byte in data:
                    self._chunk(bytes([byte]))
                continue
            self._chunk(_event(word))
        if behaviour == "endless":
            try:
                while not me.stopping.wait(0.02):
                    self._chunk(_event("more"))
            except OSError:
                me.left.set()
                raise
        self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _follow(self, notes):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        while (note := notes.get()) is not None:
            self.wfile.write(frame(note))

    def _chunk(self, data):
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _whole(self, status, value, headers=None):
        self._raw(status, json.dumps(value).encode(), "application/json", headers)

    def _raw(self, status, data, kind, headers=None):
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Quiet."""


def _event(word):
    value = {"choices": [{"index": 0, "text": word, "finish_reason": None}]}
    return f"data: {json.dumps(value)}\n\n".encode()


def _error(message, code):
    return {"error": {"message": message, "type": "server_error", "param": None, "code": code}}


class _Server(ThreadingHTTPServer):
    """Knows its connections, so that they can end with it.

    Owns: the open connections.
    """

    request_queue_size = 128
    daemon_threads = True
    block_on_close = False

    def __init__(self, address, handler):
        self.connections = set()
        super().__init__(address, handler)

    def process_request(self, request, client_address):
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):
        self.connections.discard(request)
        super().shutdown_request(request)

    def finish_request(self, request, client_address):
        try:
            super().finish_request(request, client_address)
        except _Reset:
            reset(request)
        except OSError:
            pass  # the other end has gone

    def handle_error(self, request, client_address):
        """Quiet."""


def reset(connection: socket.socket) -> None:
    """End a connection with a TCP reset, as the death of its process does."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    except OSError:
        pass


class FakeInstance:
    """The server; also a context manager.

    Owns: its socket, its threads, and what it was asked.
    """

    def __init__(self, name: str, *, num_words: int = 3, tells: bool = False) -> None:
        self.name = name
        self.num_words = num_words
        self.health: Any = "ok"
        self.knows_ready = True
        self.length = 0  # tokens of context that it tells
        self.behaviours: deque[Any] = deque()
        self.asked: list[Asked] = []
        self.released = threading.Event()  # what froze goes on
        self.left = threading.Event()  # a client went away in the middle of an endless answer
        self.stopping = threading.Event()
        self.notes: queue.Queue[Note | None] | None = queue.Queue() if tells else None
        self.followed_with: list[str | None] = []  # the keys of those who followed its events
        self._port = 0
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self.start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def host(self) -> str:
        """As the router calls it."""
        return f"127.0.0.1:{self._port}"

    def said(self) -> list[str]:
        """The words of an answer."""
        return [f"{self.name}-{i}" for i in range(self.num_words)]

    def generating(self) -> list[Asked]:
        """The generating requests that came."""
        return [one for one in self.asked if not one.path.endswith("/render")]

    def start(self) -> None:
        """Listen, on the same port as before."""
        handler = type("Handler", (_Handler,), {"instance": self})
        self.stopping.clear()
        self._server = _Server(("127.0.0.1", self._port), handler)
        self._port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Die: nobody listens, and every connection is reset; may be called twice."""
        if self._server is None:
            return
        server, self._server = self._server, None
        self.stopping.set()
        server.shutdown()
        server.server_close()
        for connection in tuple(server.connections):
            reset_both_ways(connection)
        self._thread.join(10)

    def __enter__(self) -> "FakeInstance":
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        if self.notes is not None:
            for _ in range(8):  # for everybody who may still follow
                self.notes.put(None)
        self.stop()


def reset_both_ways(connection: socket.socket) -> None:
    """End a connection whose own thread may be using it: with a reset, and without taking its socket away."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
