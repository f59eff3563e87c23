"""A hand-over over NIXL: the consumer reads the producer's cache itself, by whatever UCX finds between them.

Promises: leases, notices and the shake of hands are those of TCP; what was read counts only when the producer says
afterwards that the lease stood all the time, so that a reader that slept past its lease takes nothing for its own; NIXL
writes to no block, but to memory beside them (see `one_sided`).
Does not know: leases' ends, or what a consumer does with blocks.
"""

import contextlib
import socket
import threading
from collections.abc import Sequence
from typing import Any, Final

from octavo.features.transfer import wire
from octavo.features.transfer.data.api import Bytes
from octavo.features.transfer.data.connection import TimedConnection
from octavo.features.transfer.data.guard import LeaseGuard
from octavo.features.transfer.data.one_sided import FarMemory, NixlProgress, open_agent
from octavo.features.transfer.data.over_tcp import NO_BLOCK, TcpProducerTransport
from octavo.features.transfer.data.regions import KVRegion
from octavo.features.transfer.data.session import Sessions
from octavo.features.transfer.data.transport import ConsumerTransport, Place, ProducerTransport, Pull
from octavo.features.transfer.wire import Alive, Message, Reached, Release, WireError, receive, send

OPTION: Final = "--kv-transport nixl"


class NixlProducerTransport:
    """The producer's side of a connection, beside `TcpProducerTransport`, which answers the notices.

    Owns: which connection reads which leases.
    """

    def __init__(self, guard: LeaseGuard, regions: Sequence[KVRegion], agent: Any) -> None:
        self._guard = guard
        self._spans = tuple(region.spans for region in regions)
        self._metadata: bytes = agent.get_agent_metadata()
        self._agent = agent  # its memory stays registered as long as it lives
        self._lock = threading.Lock()
        self._reading: dict[tuple[socket.socket, str], contextlib.ExitStack] = {}
        self._progress = NixlProgress(agent)

    def answer(self, connection: socket.socket, message: Message) -> bool:
        if isinstance(message, wire.Reach):
            self._reach(connection, message.lease)
        elif isinstance(message, Release):
            send(connection, Alive((self._release((connection, message.lease)),)))
        else:
            return False
        return True

    def _reach(self, connection: socket.socket, lease: str) -> None:
        self._release((connection, lease))
        stack = contextlib.ExitStack()
        blocks = stack.enter_context(self._guard.reading(lease))
        if blocks is None:
            stack.close()
            send(connection, Reached(agent=b""))
            return
        with self._lock:
            self._reading[connection, lease] = stack
        self._progress.add(1)
        send(connection, Reached(agent=self._metadata, spans=self._spans, blocks=blocks))

    def _release(self, reader: tuple[socket.socket, str]) -> bool:
        with self._lock:
            stack = self._reading.pop(reader, None)
        if stack is None:
            return False
        self._progress.add(-1)
        stack.close()
        return True

    def left(self, connection: socket.socket) -> None:
        with self._lock:
            readers = [reader for reader in self._reading if reader[0] is connection]
        for reader in readers:
            self._release(reader)

    def close(self) -> None:
        self._progress.stop()


class NixlFetch:
    """The consumer's side of a connection.

    Owns: nothing.
    """

    def __init__(self, regions: Sequence[KVRegion], far: FarMemory) -> None:
        self._spans = tuple(region.spans for region in regions)
        self._far = far

    def __call__(self, connection: TimedConnection, pull: Pull, good: list[list[bool]]) -> None:
        job = pull.job
        send(connection.socket, wire.Reach(job.lease))
        there = receive(connection.socket, Reached)
        if not there.agent:
            return  # no such lease
        wanted = self._wanted(pull, there)
        if wanted:
            chunks = [_parts(there.spans[group], block) for group, _, block in wanted]

            def take(number: int, body: Bytes) -> None:
                group, at, _ = wanted[number]
                pull.write(job, group, at, body.data)

            self._far.read(there.agent, chunks, lambda: connection.has_time, take)
        send(connection.socket, Release(job.lease))
        if receive(connection.socket, Alive).good != (True,):
            raise WireError("the lease ended while its blocks were read")
        for group, at, _ in wanted:
            good[group][at] = True

    def _wanted(self, pull: Pull, there: Reached) -> list[tuple[int, int, int]]:
        """Group, which of its blocks, and the block there, of all that is in the lease."""
        if len(there.spans) != len(self._spans) or len(there.blocks) != len(self._spans):
            raise WireError("the other side has other groups of layers")
        sizes = [[[size for _, _, size in group] for group in side] for side in (self._spans, there.spans)]
        if sizes[0] != sizes[1]:
            raise WireError("the other side's blocks are cut otherwise")
        return [
            (group, at, table[place])
            for group, (places, table) in enumerate(zip(pull.job.places, there.blocks, strict=True))
            for at, place in enumerate(places)
            if 0 <= place < len(table) and table[place] != NO_BLOCK
        ]


def _parts(spans: Sequence[tuple[int, int, int]], block: int) -> list[tuple[int, int]]:
    """Address and bytes of what a block is made of."""
    return [(start + block * stride, size) for start, stride, size in spans]


def make(place: Place) -> tuple[ProducerTransport | None, ConsumerTransport | None]:
    """The ends that this engine takes. Raises `ConfigError`."""
    agent = open_agent([region.extent for region in place.regions] if place.role.produces else (), OPTION)
    producer = None
    if place.role.produces:
        producer = LeaseGuard()
        place.listener.serve(TcpProducerTransport(producer, place.regions, place.seal), place.seal)
        place.listener.serve(NixlProducerTransport(producer, place.regions, agent), place.seal)
    if not place.role.consumes:
        return producer, None
    far = FarMemory(agent, max(region.chunk_bytes for region in place.regions))
    return producer, Sessions(place.seal, NixlFetch(place.regions, far))
