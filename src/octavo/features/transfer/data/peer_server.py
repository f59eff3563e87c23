"""Gives other engines what this one has in host memory (TIR-32).

Promises: nobody who connects can hold up a step, write anything, or make this side keep more than one answer for each
connection; what is sent was whole when it was read.
Does not know: steps, or why a chunk is there. Who may connect is the network's matter: there is no authentication.
"""

import contextlib
import logging
import socket
import threading
from typing import Final

from octavo.base.errors import ConfigError
from octavo.features.transfer.data.ledger import RowLedger
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.wire import (
    MOST_KEYS,
    VERSION,
    Chunks,
    Fetch,
    Find,
    Found,
    Hello,
    Refused,
    Welcome,
    WireError,
    difference,
    receive,
    receive_any,
    send,
)

log = logging.getLogger(__name__)

IDLE_S: Final = 300.0  # after which a silent connection is closed
SEND_S: Final = 10.0  # for the other side to take an answer
MOST_CONNECTIONS: Final = 64


class PeerServer:
    """Owns: the listening socket, its thread, and one thread for each connection."""

    def __init__(self, host: str, port: int, seal: Seal, rows: RowLedger) -> None:
        """Port 0 takes a free one. Raises `ConfigError` when the address cannot be had."""
        self._seal = seal
        self._rows = rows
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise ConfigError(f"--kv-listen {host}:{port}: {error.strerror or error}") from None
        self.port: int = self._listener.getsockname()[1]
        self._closed = False
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, name="octavo-kv-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No connection is served after this."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(5.0)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if len(self._connections) >= MOST_CONNECTIONS:
                    connection.close()
                    continue
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="octavo-kv-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(SEND_S)
            hello = receive(connection, Hello)
            problem = self._objection(hello)
            if problem:
                send(connection, Refused(problem))
                return
            send(connection, Welcome())
            while not self._closed:
                connection.settimeout(IDLE_S)
                message = receive_any(connection)
                connection.settimeout(SEND_S)
                self._answer(connection, message)
        except (OSError, ValueError) as error:
            log.debug("a peer's connection ended: %s", error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _objection(self, hello: Hello) -> str:
        if hello.version != VERSION:
            return f"protocol {hello.version} there, {VERSION} here"
        return difference(hello.identity, self._seal.identity)

    def _answer(self, connection: socket.socket, message: object) -> None:
        if isinstance(message, Find) and len(message.keys) <= MOST_KEYS:
            send(connection, Found(tuple(key in self._rows for key in message.keys)))
        elif isinstance(message, Fetch) and len(message.keys) <= MOST_KEYS:
            self._give(connection, message.keys)
        else:
            send(connection, Refused("expected Find or Fetch, of not too many keys"))
            raise WireError("a peer asked for something else")

    def _give(self, connection: socket.socket, keys: tuple[bytes, ...]) -> None:
        """One chunk in memory at a time: one that is lost between its size and its bytes is sent as zeros, which no
        seal opens."""
        there = [key in self._rows for key in keys]
        sizes = tuple(self._size(key) if found else 0 for key, found in zip(keys, there, strict=True))
        send(connection, Chunks(sizes))
        for key, size in zip(keys, sizes, strict=True):
            if not size:
                continue
            body = self._rows.copy_out(key, self._seal.length(key))
            if body is None:
                connection.sendall(bytes(size))
            else:
                connection.sendall(self._seal.head(key, memoryview(body)))
                connection.sendall(body)

    def _size(self, key: bytes) -> int:
        return self._seal.head_bytes(key) + self._seal.length(key)
