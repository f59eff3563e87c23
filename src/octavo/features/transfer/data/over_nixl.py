"""A hand-over over NIXL: the consumer reads the producer's cache itself, by whatever UCX finds between them.

Promises: leases, notices and the shake of hands are those of TCP; what was read counts only when the producer says
afterwards that the lease stood all the time, so that a reader that slept past its lease takes nothing for its own; a
transfer that cannot be ended keeps its blocks: leaking for a while is better than memory that somebody still writes to
(PDX-9).
Does not know: leases' ends, or what a consumer does with blocks.

NIXL is a package of its own (the extra `nixl`); it needs no GPU.
"""

import contextlib
import logging
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any, Final

from octavo.base.errors import ConfigError
from octavo.base.packages import install_command
from octavo.features.transfer.data.connection import Connection
from octavo.features.transfer.data.guard import LeaseGuard
from octavo.features.transfer.data.over_tcp import NO_BLOCK, LeaseGiver
from octavo.features.transfer.data.regions import KVRegion
from octavo.features.transfer.data.session import Sessions
from octavo.features.transfer.data.transport import Giving, Place, Pull, Taking
from octavo.features.transfer.wire import Alive, Message, Reach, Reached, Release, WireError, receive, send

try:
    import nixl._api as nixl
except ImportError:  # an extra
    nixl = None

log = logging.getLogger(__name__)

POLL_S: Final = 0.0002
STOP_S: Final = 2.0
CANCEL_S: Final = 1.0  # between attempts to end a transfer that goes on after its time
MEMORY: Final = "DRAM"


def open_agent(regions: Sequence[KVRegion]) -> Any:
    """A NIXL agent that knows the cache. Raises `ConfigError` without the package, or where it does not work."""
    if nixl is None:
        raise ConfigError(f"--kv-transport nixl needs the package nixl: {install_command('nixl')}")
    for name in ("nixl", "nixl._api"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        strict = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        # Its own thread of progress spins, beside the engine's compute: progress is made here, while somebody reads.
        config = nixl.nixl_agent_config(backends=["UCX"], enable_prog_thread=False, sync_mode=strict)
        agent = nixl.nixl_agent(uuid.uuid4().hex, config)
        extents = {region.extent for region in regions}
        agent.register_memory([(address, size, 0, "") for address, size in sorted(extents)], MEMORY)
    except Exception as error:  # its own errors have no common type
        raise ConfigError(f"--kv-transport nixl: NIXL does not start here: {error}") from None
    return agent


class Progress:
    """A thread that lets NIXL work while somebody reads from here.

    Owns: the thread, and how many read.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._readers = 0
        self._busy = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="octavo-kv-nixl", daemon=True)
        self._thread.start()

    def add(self, readers: int) -> None:
        """So many more read, or less."""
        with self._lock:
            self._readers += readers
            (self._busy.set if self._readers or self._over else self._busy.clear)()

    def _run(self) -> None:
        while self._busy.wait() and not self._over:
            self._agent.get_new_notifs()
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Nobody reads any more."""
        self._over = True
        self._busy.set()
        self._thread.join(STOP_S)


class NixlGiver:
    """The producer's side of a connection, beside `LeaseGiver`, which answers the notices.

    Owns: which connection reads which leases.
    """

    def __init__(self, guard: LeaseGuard, regions: Sequence[KVRegion], agent: Any) -> None:
        self._guard = guard
        self._spans = tuple(region.spans for region in regions)
        self._metadata: bytes = agent.get_agent_metadata()
        self._agent = agent  # its memory stays registered as long as it lives
        self._lock = threading.Lock()
        self._reading: dict[tuple[socket.socket, str], contextlib.ExitStack] = {}
        self._progress = Progress(agent)

    def answer(self, connection: socket.socket, message: Message) -> bool:
        if isinstance(message, Reach):
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
    """The consumer's side of a connection: blocks are read straight into the cache.

    Owns: the agent, and the names of others' agents by what they said of themselves.
    """

    def __init__(self, regions: Sequence[KVRegion], agent: Any) -> None:
        self._spans = tuple(region.spans for region in regions)
        self._agent = agent
        self._lock = threading.Lock()
        self._names: dict[bytes, str] = {}

    def __call__(self, connection: Connection, pull: Pull, good: list[list[bool]]) -> None:
        job = pull.job
        send(connection.socket, Reach(job.lease))
        there = receive(connection.socket, Reached)
        if not there.agent:
            return  # no such lease
        wanted = self._wanted(pull, there)
        if wanted:
            mine = [part for group, at, _ in wanted for part in _parts(self._spans[group], job.blocks[group][at])]
            theirs = [part for group, _, block in wanted for part in _parts(there.spans[group], block)]
            self._read(there.agent, mine, theirs, connection)
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

    def _read(
        self, agent: bytes, mine: list[tuple[int, int, int]], theirs: list[tuple[int, int, int]], within: Connection
    ) -> None:
        with self._lock:
            name = self._names.get(agent)
            if name is None:
                name = self._names[agent] = self._agent.add_remote_agent(agent)
        local, remote = (self._agent.get_xfer_descs(parts, MEMORY) for parts in (mine, theirs))
        try:
            handle = self._agent.initialize_xfer("READ", local, remote, name)
        except Exception as error:  # its own errors have no common type
            self._forget(agent)
            raise WireError(f"NIXL cannot read there: {error}") from None
        try:
            state = self._agent.transfer(handle)
            while state == "PROC" and within.has_time:
                time.sleep(POLL_S)
                state = self._agent.check_xfer_state(handle)
        except Exception as error:  # as above
            self._forget(agent)
            raise WireError(f"NIXL cannot read there: {error}") from None
        finally:
            self._end(handle)  # whatever happened, it may still write
        if state != "DONE":
            self._forget(agent)
            raise WireError("NIXL did not read everything in time" if state == "PROC" else "NIXL failed to read")

    def _end(self, handle: Any) -> None:
        """Give the transfer's handle back; as long as that fails, something may still write to our blocks."""
        while True:
            try:
                self._agent.release_xfer_handle(handle)
                return
            except Exception as error:  # as above
                log.warning("a transfer of NIXL cannot be ended yet, and its blocks are kept: %s", error)
                time.sleep(CANCEL_S)

    def _forget(self, agent: bytes) -> None:
        """The other side is made known anew next time."""
        with self._lock:
            name = self._names.pop(agent, None)
        if name is not None:
            with contextlib.suppress(Exception):  # it may be gone already
                self._agent.remove_remote_agent(name)


def _parts(spans: Sequence[tuple[int, int, int]], block: int) -> list[tuple[int, int, int]]:
    """Address, bytes and device of what a block is made of."""
    return [(start + block * stride, size, 0) for start, stride, size in spans]


def make(place: Place) -> tuple[Giving | None, Taking | None]:
    """The ends that this engine takes. Raises `ConfigError`."""
    agent = open_agent(place.regions)
    giving = None
    if place.role.produces:
        giving = LeaseGuard()
        place.door.serve(LeaseGiver(giving, place.regions, place.seal), place.seal)
        place.door.serve(NixlGiver(giving, place.regions, agent), place.seal)
    taking = Sessions(place.seal, NixlFetch(place.regions, agent)) if place.role.consumes else None
    return giving, taking
