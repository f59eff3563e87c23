"""Several clients at once, and clients that leave in every way a connection can end.

Promises: `together` gives the results in the order of the calls, or the first error; a `Visitor` is a bare socket
with one request on it, so the test decides what happens to the connection.
Does not know: what is asked.
"""

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

from tests.support.live import Live

PATIENCE_S = 120.0


def together(calls: Iterable[Callable[[], Any]], timeout_s: float = PATIENCE_S) -> list[Any]:
    """Run all calls at the same time, each on a thread of its own; raises the first error."""
    listed = list(calls)
    results: list[Any] = [None] * len(listed)
    errors: list[BaseException] = []

    def run(place: int) -> None:
        try:
            results[place] = listed[place]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(listed))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), f"no answer within {timeout_s} s"
    return results


class Visitor:
    """One request on a socket of its own.

    Owns: the socket and what came over it.
    """

    def __init__(self, server: Live, path: str, headers: dict[str, str] | None = None, **body: Any) -> None:
        where = urlsplit(server.url)
        self.socket = socket.create_connection((where.hostname, where.port), timeout=PATIENCE_S)
        data = json.dumps({"model": server.model, **body}).encode()
        named = {"host": "test", "content-type": "application/json", "content-length": str(len(data))}
        lines = "".join(f"{k}: {v}\r\n" for k, v in {**named, **(headers or {})}.items())
        self.socket.sendall(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + data)
        self.received = b""

    def read_deltas(self, count: int) -> None:
        """Wait for this many events of a stream."""
        while self.received.count(b"data: {") < count:
            data = self.socket.recv(65536)
            assert data, f"the stream ended early: {self.received[-300:]!r}"
            self.received += data

    def close(self) -> None:
        """Leave in the ordinary way."""
        self.socket.close()

    def reset(self) -> None:
        """Leave with a TCP reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def half_close(self) -> None:
        """Say that nothing more will be sent, and keep the socket open for reading."""
        self.socket.shutdown(socket.SHUT_WR)

    def vanish(self) -> None:
        """Close in both directions without taking the socket away from its owner."""
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
