"""Chunks in a Redis or Valkey server, shared by engines on any machine (TIR-31).

Promises: a server that is slow, gone or answers nonsense makes misses, each call as a whole within `TIMEOUT_S` and what
its bytes take at `LEAST_BYTES_PER_S`, and is then left alone for a while; what it gives is used only when its seal fits.
Does not know: what a chunk holds. How much the server keeps, and what it forgets, is the server's matter
(`maxmemory`, `maxmemory-policy allkeys-lru`).

A chunk is one value under `octavo:<fingerprint>:<key>`.
"""

import socket
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from octavo.base.errors import ConfigError
from octavo.base.packages import install_command
from octavo.features.transfer.address import TierAddress
from octavo.features.transfer.data.api import Bytes
from octavo.features.transfer.data.health import TierHealth
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.data.timed import Deadline, TimedSocket, seconds_for
from octavo.ops import spare

try:
    import redis
except ImportError:  # an extra
    redis = None  # type: ignore[assignment]

T = TypeVar("T")
TIMEOUT_S: Final = 1.0
BATCH_BYTES: Final = 8 << 20  # in one request
# What its owner may do when a server refuses, by a word of what it says.
REFUSALS: Final = {
    "maxmemory": "; start it with --maxmemory-policy allkeys-lru, or give it more memory",
    "read only replica": "; name the primary server, not its replica",
    "no permissions": "; its user needs the commands EXISTS, MGET, SET and DEL",
    "MISCONF": "; see why it cannot save to its disk, or set stop-writes-on-bgsave-error no",
}


class RedisTier:
    """One server.

    Owns: the connection.
    """

    def __init__(self, client: Any, seal: Seal, health: TierHealth, deadline: Deadline) -> None:
        """`deadline`: the one that the client's connections keep to."""
        self._client = client
        self._seal = seal
        self._health = health
        self._deadline = deadline
        self._prefix = f"octavo:{seal.space}:".encode()

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        def ask() -> list[bool]:
            line = self._client.pipeline(transaction=False)
            for key in keys:
                line.exists(self._prefix + key)
            return [bool(answer) for answer in line.execute()]

        self._begin()
        return self._try(ask, [False] * len(keys))

    def read(self, keys: Sequence[bytes], rows: Sequence[Bytes]) -> list[bool]:
        self._begin(keys)
        good: list[bool] = []
        for part in self._batches(keys):
            names = [self._prefix + key for key in keys[part]]
            values = self._try(lambda names=names: self._client.mget(names), [None] * len(names))  # type: ignore[misc]
            good += [self._open(*each) for each in zip(keys[part], values, rows[part], strict=True)]
        return good

    def _open(self, key: bytes, value: bytes | None, row: Bytes) -> bool:
        if value is None:
            return False
        head, length = self._seal.head_bytes(key), self._seal.length(key)
        body = memoryview(value)[head:]
        if len(body) != length or not self._seal.opens(key, value[:head], body):
            self._health.note("odd", "a value under a key of ours is not a chunk of ours, and is removed")
            self._try(lambda: self._client.delete(self._prefix + key), 0)
            return False
        row.data[:length] = body
        return True

    def write(self, keys: Sequence[bytes], rows: Sequence[Bytes]) -> list[bool]:
        self._begin(keys)
        good: list[bool] = []
        for part in self._batches(keys):

            def put(part: slice = part) -> list[bool]:
                line = self._client.pipeline(transaction=False)
                for key, row in zip(keys[part], rows[part], strict=True):
                    body = row.data[: self._seal.length(key)]
                    line.set(self._prefix + key, b"".join((self._seal.head(key, body, spare.crc32), body)))
                return [self._took(answer) for answer in line.execute(raise_on_error=False)]

            good += self._try(put, [False] * len(keys[part]))
        return good

    def _took(self, answer: object) -> bool:
        """The server took one chunk; that it refuses one does not speak against reading from it."""
        if isinstance(answer, Exception):
            done = next((what for word, what in REFUSALS.items() if word in str(answer)), "")
            self._health.note("refuses", f"the server does not take blocks: {str(answer).rstrip('.')}{done}")
        return answer is True

    def _batches(self, keys: Sequence[bytes]) -> list[slice]:
        """Keys whose chunks together are not much more than `BATCH_BYTES`."""
        out, start, size = [], 0, 0
        for i, key in enumerate(keys):
            size += self._seal.length(key)
            if size >= BATCH_BYTES:
                out.append(slice(start, i + 1))
                start, size = i + 1, 0
        return [*out, slice(start, len(keys))] if start < len(keys) else out

    def _begin(self, keys: Sequence[bytes] = ()) -> None:
        """A call on this tier begins, which moves these keys' chunks."""
        self._deadline.within(TIMEOUT_S + seconds_for(sum(self._seal.length(key) for key in keys)))

    def _try(self, call: Callable[[], T], otherwise: T) -> T:
        if self._health.rests:
            return otherwise
        try:
            answer = call()
        except Exception as error:  # to an answer that is no sense the client has errors of many types
            self._health.failed(error)
            return otherwise
        self._health.worked()
        return answer

    def close(self) -> None:
        self._client.close()


def _timed(deadline: Deadline) -> type[Any]:
    """The client's kind of connection, whose socket keeps to a deadline: its own limits are for each piece that comes."""

    class Timed(redis.Connection):
        def _connect(self) -> socket.socket:
            return TimedSocket.of(super()._connect(), deadline)  # type: ignore[no-untyped-call]

    return Timed


def check(address: TierAddress) -> None:
    """Raises `ConfigError` without the package."""
    if redis is None:
        raise ConfigError(f"--kv-tier {address.text} needs the package redis: {install_command('redis')}")


def make(address: TierAddress, seal: Seal, health: TierHealth) -> RedisTier:
    """The tier of a `redis://` address, after `check`."""
    deadline = Deadline()
    pool = redis.ConnectionPool.from_url(
        address.name,
        connection_class=_timed(deadline),
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        health_check_interval=30,
        retry=None,
    )
    return RedisTier(redis.Redis(connection_pool=pool), seal, health, deadline)
