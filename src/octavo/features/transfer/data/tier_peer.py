"""Another engine's host memory as a tier: read over TCP, or by NIXL where that is asked for; never written (TIR-32).

Promises: a peer that is gone, slow, frozen or of another model makes misses, each call as a whole within `TIMEOUT_S` and
what its bytes take at `LEAST_BYTES_PER_S`, and is then left alone for a while; why it was refused is said once.
Does not know: what a chunk holds, or how the peer keeps it (see `peer_server`).
"""

import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from octavo.features.transfer.address import NIXL, TierAddress, parse_listen
from octavo.features.transfer.data.api import Bytes
from octavo.features.transfer.data.connection import TimedConnection
from octavo.features.transfer.data.health import TierHealth
from octavo.features.transfer.data.one_sided import FarMemory
from octavo.features.transfer.data.peer_rows import RowReader, open_far
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.data.timed import TimedSocket, seconds_for
from octavo.features.transfer.wire import (
    MOST_KEYS,
    ChunkSizes,
    Fetch,
    Find,
    FoundKeys,
    WireError,
    receive,
    receive_into,
    send,
)

T = TypeVar("T")
TIMEOUT_S: Final = 2.0


class PeerTier:
    """One other engine.

    Owns: the connection.
    """

    def __init__(self, host: str, port: int, seal: Seal, health: TierHealth, far: FarMemory | None = None) -> None:
        """`far`: reads what the peer points at; without it the peer sends."""
        self._address = (host, port)
        self._reader = None if far is None else RowReader(far, seal)
        self._seal = seal
        self._health = health
        self._connection: TimedConnection | None = None

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        def ask(connection: TimedSocket) -> list[bool]:
            good: list[bool] = []
            for start in range(0, len(keys), MOST_KEYS):
                part = tuple(keys[start : start + MOST_KEYS])
                send(connection, Find(part))
                answer = receive(connection, FoundKeys).good
                if len(answer) != len(part):
                    raise WireError("an answer has another length than its question")
                good += answer
            return good

        return self._try(ask, [False] * len(keys))

    def read(self, keys: Sequence[bytes], rows: Sequence[Bytes]) -> list[bool]:
        good = [False] * len(keys)

        def fetch(connection: TimedSocket) -> None:
            if self._reader is not None:
                never = self._reader.read(connection, keys, rows, good)
                if never is None:
                    return
                if never:
                    self._health.note("tcp", f"it is read over TCP: {never}")
            for start in range(0, len(keys), MOST_KEYS):
                part = tuple(keys[start : start + MOST_KEYS])
                send(connection, Fetch(part))
                sizes = receive(connection, ChunkSizes).sizes
                if len(sizes) != len(part):
                    raise WireError("an answer has another length than its question")
                for i, size in enumerate(sizes, start):
                    if size:
                        good[i] = self._take(connection, keys[i], size, rows[i])

        self._try(fetch, None, sum(self._seal.length(key) for key in keys))
        return good

    def _take(self, connection: TimedSocket, key: bytes, size: int, row: Bytes) -> bool:
        head_bytes, length = self._seal.head_bytes(key), self._seal.length(key)
        if size != head_bytes + length:
            raise WireError(f"a chunk of {size} bytes cannot be one of ours")
        head = bytearray(head_bytes)
        receive_into(connection, memoryview(head))
        body = row.data[:length]
        receive_into(connection, body)
        return self._seal.opens(key, bytes(head), body)

    def write(self, keys: Sequence[bytes], rows: Sequence[Bytes]) -> list[bool]:
        return [False] * len(keys)

    def _try(self, call: Callable[[TimedSocket], T], otherwise: T, num_bytes: int = 0) -> T:
        """Ask, where the peer is asked at all, for an answer of at most so many bytes."""
        if self._health.rests:
            return otherwise
        began = time.monotonic()
        try:
            if self._connection is None:
                self._connection = TimedConnection(*self._address, self._seal, TIMEOUT_S)
            self._connection.within(began + TIMEOUT_S + seconds_for(num_bytes) - time.monotonic())
            answer = call(self._connection.socket)
        except (OSError, ValueError) as error:
            self._health.failed(error)
            self._drop()
            return otherwise
        self._health.worked()
        return answer

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        self._drop()


def make(address: TierAddress, seal: Seal, health: TierHealth, far: FarMemory | None = None) -> PeerTier:
    """The tier of a `peer://` address. `far`: what its threads share, where it is read by NIXL. Raises `ConfigError`."""
    if far is None and address.transport == NIXL:
        far = open_far(address, seal)
    return PeerTier(*parse_listen(address.place), seal, health, far)
