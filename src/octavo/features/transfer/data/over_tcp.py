"""A hand-over over TCP: blocks are copied out of the producer's cache while their lease is open, and sent from the copy.

Promises: works wherever two engines can connect; what is being sent holds up no lease's end.
Does not know: leases' ends, or what a consumer does with blocks.
"""

import socket
from collections.abc import Sequence
from typing import Final

import numpy as np

from octavo.features.transfer.data.connection import TimedConnection
from octavo.features.transfer.data.guard import LeaseGuard
from octavo.features.transfer.data.peer_server import give
from octavo.features.transfer.data.regions import KVRegion
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.data.session import Sessions
from octavo.features.transfer.data.transport import ConsumerTransport, Place, ProducerTransport, Pull
from octavo.features.transfer.disagg import LeaseNews
from octavo.features.transfer.wire import (
    MOST_KEYS,
    Alive,
    ChunkSizes,
    FetchBlocks,
    LeaseHeartbeat,
    Message,
    Return,
    WireError,
    lease_key,
    receive,
    receive_into,
    send,
)

NO_BLOCK: Final = 0
TAKE_AT_ONCE: Final = 64  # blocks in one question


class TcpProducerTransport:
    """The producer's side of a connection.

    Owns: nothing; leases are the guard's.
    """

    def __init__(self, guard: LeaseGuard, regions: Sequence[KVRegion], seal: Seal) -> None:
        self._guard = guard
        self._regions = tuple(regions)
        self._seal = seal

    def answer(self, connection: socket.socket, message: Message) -> bool:
        if isinstance(message, FetchBlocks):
            if len(message.places) > MOST_KEYS or not 0 <= message.group < len(self._regions):
                return False
            self._give(connection, message)
        elif isinstance(message, LeaseHeartbeat) and len(message.leases) <= MOST_KEYS:
            send(connection, Alive(self._guard.tell(message.leases, LeaseNews.HEARTBEAT)))
        elif isinstance(message, Return) and len(message.leases) <= MOST_KEYS:
            news = LeaseNews.DONE if message.done else LeaseNews.ABORTED
            send(connection, Alive(self._guard.tell(message.leases, news)))
        else:
            return False
        return True

    def _give(self, connection: socket.socket, message: FetchBlocks) -> None:
        place_of = {lease_key(message.lease, place, message.group): place for place in message.places}
        with self._guard.reading(message.lease) as tables:
            table = () if tables is None else tables[message.group]
        there = [(key, 0 <= place < len(table) and table[place] != NO_BLOCK) for key, place in place_of.items()]
        give(connection, self._seal, there, lambda key: self._copy(message.lease, message.group, place_of[key]))

    def _copy(self, lease: str, group: int, place: int) -> bytearray | None:
        with self._guard.reading(lease) as tables:
            if tables is None:
                return None
            body = bytearray(self._regions[group].chunk_bytes)
            self._regions[group].read(tables[group][place], np.frombuffer(body, dtype=np.uint8))
            return body

    def left(self, connection: socket.socket) -> None:
        return None

    def close(self) -> None:
        return None


class TcpFetch:
    """The consumer's side of a connection.

    Owns: nothing.
    """

    def __init__(self, seal: Seal) -> None:
        self._seal = seal

    def __call__(self, connection: TimedConnection, pull: Pull, good: list[list[bool]]) -> None:
        for group, places in enumerate(pull.job.places):
            for start in range(0, len(places), TAKE_AT_ONCE):
                part = places[start : start + TAKE_AT_ONCE]
                send(connection.socket, FetchBlocks(lease=pull.job.lease, group=group, places=part))
                sizes = receive(connection.socket, ChunkSizes).sizes
                if len(sizes) != len(part):
                    raise WireError("an answer has another length than its question")
                for at, size in enumerate(sizes, start):
                    if size:
                        good[group][at] = self._take(connection, pull, group, at, size)

    def _take(self, connection: TimedConnection, pull: Pull, group: int, at: int, size: int) -> bool:
        key = lease_key(pull.job.lease, pull.job.places[group][at], group)
        head_bytes, length = self._seal.head_bytes(key), self._seal.length(key)
        if size != head_bytes + length:
            raise WireError(f"a block of {size} bytes cannot be one of ours")
        room = bytearray(size)
        receive_into(connection.socket, memoryview(room))
        body = memoryview(room)[head_bytes:]
        if not self._seal.opens(key, bytes(room[:head_bytes]), body):
            return False
        pull.write(pull.job, group, at, body)
        return True


def make(place: Place) -> tuple[ProducerTransport | None, ConsumerTransport | None]:
    """The ends that this engine takes. Raises `ConfigError` when its address cannot be had."""
    producer = None
    if place.role.produces:
        producer = LeaseGuard()
        place.listener.serve(TcpProducerTransport(producer, place.regions, place.seal), place.seal)
    return producer, Sessions(place.seal, TcpFetch(place.seal)) if place.role.consumes else None
