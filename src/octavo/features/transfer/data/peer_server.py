"""Gives other engines what this one has: chunks in host memory, and blocks under a lease (TIR-32, PDX-6).

Promises: nobody who connects can hold up a step, write anything, or make this side keep more than one answer for each
connection; what is sent was whole when it was read.
Does not know: steps, or why a chunk is there. Who may connect is the network's matter: there is no authentication.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from octavo.base.errors import ConfigError
from octavo.features.transfer.data.health import TierHealth
from octavo.features.transfer.data.ledger import RowLedger
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.data.timed import TimedSocket, seconds_for
from octavo.features.transfer.disagg import difference
from octavo.features.transfer.wire import (
    MOST_KEYS,
    VERSION,
    ChunkSizes,
    Fetch,
    FetchBlocks,
    Find,
    FoundKeys,
    Hello,
    Message,
    Refused,
    Welcome,
    WireError,
    receive,
    receive_any,
    send,
)

log = logging.getLogger(__name__)

IDLE_S: Final = 300.0  # after which a connection is closed on which no whole question came
SEND_S: Final = 10.0  # for the other side to say hello, to end a question it began, or to take an answer
CLOSE_S: Final = 5.0
MOST_CONNECTIONS: Final = 64
AGAIN_S: Final = 0.1  # after a connection that could not be accepted, and twice as long after each that follows
MOST_AGAIN_S: Final = 5.0
STARVED_S: Final = 1.0  # for copying a chunk out of memory, which takes a millisecond


class PeerService(Protocol):
    """What a server gives, by kind of question."""

    def answer(self, connection: socket.socket, message: Message) -> bool:
        """Answer `message`; False when it is no question of this giver's. Raises `OSError`."""

    def left(self, connection: socket.socket) -> None:
        """The connection is over."""

    def close(self) -> None:
        """No connection comes any more, and all are over."""


class PeerServer:
    """Owns: the listening socket, its thread, and the connections with a thread for each."""

    def __init__(self, host: str, port: int, seal: Seal, givers: Sequence[PeerService]) -> None:
        """Port 0 takes a free one. Raises `ConfigError` when the address cannot be had."""
        self._seal = seal
        self._givers = list(givers)
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise ConfigError(f"--kv-listen {host}:{port}: {error.strerror or error}") from None
        self.port: int = self._listener.getsockname()[1]
        self._closed = False
        self._over = threading.Event()
        self._health = TierHealth(f"KV for other engines at port {self.port}")
        self._lock = threading.Lock()
        self._connections: dict[TimedSocket, threading.Thread] = {}
        self._thread = threading.Thread(target=self._accept, name="octavo-kv-peers", daemon=True)
        self._thread.start()

    def add(self, service: PeerService) -> None:
        """One more that answers."""
        self._givers.append(service)

    def close(self) -> None:
        """No connection is served after this, and no thread is left. May be called twice."""
        self._closed = True
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            threads = (self._thread, *self._connections.values())
        until = time.monotonic() + CLOSE_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            log.warning("a peer's connection could not be ended")
        for service in self._givers:
            service.close()

    def _accept(self) -> None:
        pause_s = AGAIN_S
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:  # such as too many open files: it passes, and until then peers compute
                    self._health.note("accept", f"nobody can connect: {error}")
                    self._over.wait(pause_s)
                    pause_s = min(2 * pause_s, MOST_AGAIN_S)
                continue
            pause_s = AGAIN_S
            with self._lock:
                if self._closed or len(self._connections) >= MOST_CONNECTIONS:
                    connection.close()
                    continue
                timed = TimedSocket.of(connection)
                thread = threading.Thread(target=self._serve, args=(timed,), name="octavo-kv-peer", daemon=True)
                self._connections[timed] = thread
                thread.start()

    def _serve(self, connection: TimedSocket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.within(SEND_S)
            hello = receive(connection, Hello)
            problem = self._objection(hello)
            if problem:
                send(connection, Refused(problem))
                return
            send(connection, Welcome(now=time.time()))
            while not self._closed:
                connection.within(IDLE_S)
                connection.recv(1, socket.MSG_PEEK)
                connection.within(SEND_S)
                message = receive_any(connection)
                connection.within(SEND_S + seconds_for(self._most_bytes(message)))
                if not any(service.answer(connection, message) for service in self._givers):
                    send(connection, Refused(f"{type(message).__name__} is not answered here, or asks for too much"))
                    raise WireError("a peer asked for something else")
        except (OSError, ValueError) as error:
            log.debug("a peer's connection ended: %s", error)
        finally:
            with self._lock:
                self._connections.pop(connection, None)
            connection.close()
            for service in self._givers:
                service.left(connection)

    def _most_bytes(self, message: Message) -> int:
        """Of KV that an answer may have."""
        keys = (
            message.keys if isinstance(message, Fetch) else message.places if isinstance(message, FetchBlocks) else ()
        )
        return len(keys) * self._seal.most_bytes

    def _objection(self, hello: Hello) -> str:
        if hello.version != VERSION:
            return f"protocol {hello.version} there, {VERSION} here"
        return difference(hello.identity, self._seal.identity)


class PeerListener:
    """The one server of an engine, whichever of its parts gives something; no address: there is none.

    Owns: the server, from the first giver on.
    """

    def __init__(self, address: tuple[str, int] | None) -> None:
        self._address = address
        self._server: PeerServer | None = None

    def serve(self, service: PeerService, seal: Seal) -> None:
        """Let `service` answer too. Raises `ConfigError` when the address cannot be had."""
        if self._address is None:
            return
        if self._server is None:
            self._server = PeerServer(*self._address, seal, [service])
        else:
            self._server.add(service)

    def close(self) -> None:
        """Nobody is served after this. May be called twice."""
        if self._server is not None:
            self._server.close()


class RowService:
    """Gives chunks in host memory by key.

    Owns: nothing; rows are the ledger's.
    """

    def __init__(self, rows: RowLedger, seal: Seal) -> None:
        self._rows = rows
        self._seal = seal
        self._health = TierHealth("KV for other engines")

    def answer(self, connection: socket.socket, message: Message) -> bool:
        if isinstance(message, Find) and len(message.keys) <= MOST_KEYS:
            send(connection, FoundKeys(tuple(key in self._rows for key in message.keys)))
        elif isinstance(message, Fetch) and len(message.keys) <= MOST_KEYS:
            give(connection, self._seal, ((key, key in self._rows) for key in message.keys), self._body)
        else:
            return False
        return True

    def left(self, connection: socket.socket) -> None:
        return None

    def close(self) -> None:
        return None

    def _body(self, key: bytes) -> bytearray | None:
        began = time.monotonic()
        body = self._rows.copy_out(key, self._seal.length(key))
        if (took := time.monotonic() - began) > STARVED_S:
            self._health.note("starved", f"a chunk took {took:.1f} s to copy: this machine has no time left for others")
        return body


def give(
    connection: socket.socket,
    seal: Seal,
    keys: Iterable[tuple[bytes, bool]],
    body_of: Callable[[bytes], bytearray | None],
) -> None:
    """Send `ChunkSizes` and what is there of these keys, sealed, with one chunk in memory at a time.

    One that is lost between its size and its bytes is sent as zeros, which no seal opens.
    """
    pairs = list(keys)
    sizes = tuple(seal.head_bytes(key) + seal.length(key) if there else 0 for key, there in pairs)
    send(connection, ChunkSizes(sizes))
    for (key, _), size in zip(pairs, sizes, strict=True):
        if not size:
            continue
        body = body_of(key)
        if body is None:
            connection.sendall(bytes(size))
        else:
            connection.sendall(seal.head(key, memoryview(body)))
            connection.sendall(body)
