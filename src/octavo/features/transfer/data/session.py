"""This engine as a reader of others: who is connected to, what is kept alive there, what is being fetched (PDX-6).

Promises: a shake of hands never happens in a step; that, and a notice with its answer, take `TIMEOUT_S` at most as a
whole; every pull ends and is reported within `TIMEOUT_S` and what its bytes take at `LEAST_BYTES_PER_S`; a lease that is watched is kept alive while its KV is being
fetched or waited for; an engine that was not seen for `TTL_S` is forgotten, never while something is under way (PDX-10).
Does not know: requests, blocks' owners, or what a failure means.

One engine has a connection for notices (beats and ends of leases), which never wait for KV, and some for KV, so that a
prompt waits for no other; each has a thread.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from octavo.features.transfer.address import parse_listen
from octavo.features.transfer.data.connection import TimedConnection
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.data.timed import seconds_for
from octavo.features.transfer.data.transport import Pull
from octavo.features.transfer.data.worker_thread import Outbox
from octavo.features.transfer.disagg import LeaseDrop, LeaseEvent, LeaseNews, LeaseWatch
from octavo.features.transfer.plan import JobReport
from octavo.features.transfer.wire import (
    MOST_KEYS,
    Alive,
    LeaseHeartbeat,
    Return,
    WireError,
    lease_key,
    receive,
    send,
)

log = logging.getLogger(__name__)

TIMEOUT_S: Final = 5.0  # for a shake of hands, for a notice, and for a prompt beside the time of its bytes
PULL_S: Final = 60.0  # for one prompt, from when it was asked for
PULLERS: Final = 4  # prompts that are read at once from one engine
TTL_S: Final = 600.0
HEARTBEATS: Final = 3  # in the time of a lease
MIN_HEARTBEAT_S: Final = 0.05  # whatever a hint says
RETRY_S: Final = 1.0  # after a beat that was not taken
MOST_PEERS: Final = 128  # whatever addresses hints have


Fetch = Callable[[TimedConnection, Pull, list[list[bool]]], None]
"""Fetch a pull's blocks over a connection, which ends in time, noting each that is there. Raises `OSError` or `ValueError`;
blocks that were noted count all the same."""


@dataclass(slots=True)
class _Peer:
    """One engine. Owns: its queues, threads and leases; `lock` guards `leases` and `seen`."""

    host: str
    port: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    leases: dict[str, float] = field(default_factory=dict)  # seconds of each
    pulls: "queue.SimpleQueue[tuple[Pull, float] | None]" = field(default_factory=queue.SimpleQueue)  # and when
    ends: "queue.SimpleQueue[LeaseDrop | None]" = field(default_factory=queue.SimpleQueue)
    under_way: int = 0
    seen: float = 0.0
    pullers: list[threading.Thread] = field(default_factory=list)
    tellers: list[threading.Thread] = field(default_factory=list)
    failed: float = -math.inf  # when there was no connection for KV last
    failure: str = ""  # and why

    @property
    def name(self) -> str:
        return f"{self.host}:{self.port}"

    def tell_to_end(self) -> None:
        """Its threads end when all that was put before is done."""
        self.ends.put(None)
        for _ in self.pullers:
            self.pulls.put(None)


class Sessions:
    """All engines that are read from.

    Owns: their connections and threads, which lease is whose, and notices that wait for the next report.
    """

    def __init__(self, seal: Seal, fetch: Fetch, clock: Callable[[], float] = time.monotonic) -> None:
        self._seal = seal
        self._fetch = fetch
        self._clock = clock
        self._peers: dict[tuple[str, int], _Peer] = {}
        self._home: dict[str, _Peer] = {}  # by lease
        self._lost: Outbox[LeaseEvent] = Outbox()

    # ---- called by the engine's thread ------------------------------------------------------

    def watch(self, watch: LeaseWatch) -> None:
        """Keep a lease alive from now on, where it was first said to be. It is lost when there are too many engines."""
        if watch.lease in self._home:
            return
        peer = self._peer(*parse_listen(watch.address.partition("://")[2], "the address in a hint"))
        if peer is None:
            log.warning("%d engines are read from already; nothing is fetched from %s", MOST_PEERS, watch.address)
            self._lost.put(LeaseEvent(watch.lease, LeaseNews.LOST))
            return
        with peer.lock:
            peer.leases[watch.lease] = watch.lease_s
        self._home[watch.lease] = peer
        peer.ends.put(LeaseDrop(lease="", done=True))  # wakes the beats: the next one may be due sooner

    def pull(self, pull: Pull) -> None:
        """Fetch blocks of a watched lease."""
        peer = self._home.get(pull.job.lease)
        if peer is None:  # another request with the same lease has given it up
            bad = (False,) * sum(map(len, pull.job.places))
            pull.done(JobReport(job=pull.job.job, good=bad, error="its lease was given up"))
            return
        with peer.lock:
            peer.under_way += 1
        if len(peer.pullers) < min(peer.under_way, PULLERS):
            self._start(peer, self._run_pulls, peer.pullers)
        peer.pulls.put((pull, time.monotonic()))

    def drop(self, drop: LeaseDrop) -> None:
        """A lease is over. Its producer is told once; if that fails, silence ends it there."""
        peer = self._home.pop(drop.lease, None)
        if peer is None:
            return
        with peer.lock:
            peer.leases.pop(drop.lease, None)
        peer.ends.put(drop)

    def news(self) -> tuple[LeaseEvent, ...]:
        """Leases that their producers no longer know."""
        return self._lost.take()

    def stop(self) -> None:
        """What was put is told to the others, as far as they answer; then nothing more happens."""
        for peer in self._peers.values():
            peer.tell_to_end()
        end = time.monotonic() + TIMEOUT_S
        for peer in self._peers.values():
            for thread in (*peer.pullers, *peer.tellers):
                thread.join(max(0.0, end - time.monotonic()))

    def __len__(self) -> int:
        return len(self._peers)

    def _peer(self, host: str, port: int) -> _Peer | None:
        """The engine at this address; a new one makes room by forgetting those that were not seen for long. None: there
        is no room."""
        peer = self._peers.get((host, port))
        now = self._clock()
        if peer is None:
            self._forget(now - TTL_S)
            if len(self._peers) >= MOST_PEERS:
                self._forget(now)
            if len(self._peers) >= MOST_PEERS:
                return None
            peer = _Peer(host, port)
            self._peers[host, port] = peer
            self._start(peer, self._run_notices, peer.tellers)
        peer.seen = now
        return peer

    def _start(self, peer: _Peer, what: Callable[[_Peer], None], threads: list[threading.Thread]) -> None:
        thread = threading.Thread(target=what, args=(peer,), name=f"octavo-kv-{peer.name}", daemon=True)
        threads.append(thread)
        thread.start()

    def _forget(self, seen: float) -> None:
        """Those that were last seen before then, and have nothing under way."""
        for address, peer in list(self._peers.items()):
            with peer.lock:
                idle = not peer.leases and not peer.under_way and peer.seen < seen
            if idle:
                peer.tell_to_end()
                del self._peers[address]

    # ---- the thread of KV ---------------------------------------------------------------------

    def _run_pulls(self, peer: _Peer) -> None:
        connection: TimedConnection | None = None
        while (item := peer.pulls.get()) is not None:
            connection = self._do(peer, *item, connection)
            with peer.lock:
                peer.under_way -= 1
        if connection is not None:
            connection.close()

    def _do(self, peer: _Peer, pull: Pull, asked: float, connection: TimedConnection | None) -> TimedConnection | None:
        """One pull; the connection for the next one. A connection that went bad since its last use is made anew once."""
        began, job = time.monotonic(), pull.job
        good = [[False] * len(places) for places in job.places]
        tries = 1 if connection is None else 2
        error = (
            peer.failure if asked < peer.failed else "those before it took too long" if began > asked + PULL_S else None
        )
        for _ in range(tries if error is None else 0):
            try:
                if connection is None:
                    connection = self._connect(peer)
                connection.within(self._until(pull, asked, began) - time.monotonic())
                self._fetch(connection, pull, good)
                error = None
                break
            except Exception as problem:  # the border between one producer and those who wait for it
                error = f"{problem}" or type(problem).__name__
                if connection is not None:
                    connection.close()
                    connection = None
        if error is not None:
            log.warning("KV could not be fetched from %s: %s", peer.name, error)
        flat = tuple(fine for row in good for fine in row)
        num_bytes = sum(self._seal.length(lease_key("", 0, g)) * sum(row) for g, row in enumerate(good))
        seconds = time.monotonic() - began
        pull.done(JobReport(job=job.job, good=flat, num_bytes=num_bytes, seconds=seconds, error=error))
        return connection

    def _until(self, pull: Pull, asked: float, began: float) -> float:
        """When a pull must have ended, on the monotonic clock."""
        num_bytes = sum(
            self._seal.length(lease_key("", 0, g)) * len(places) for g, places in enumerate(pull.job.places)
        )
        return min(asked + PULL_S, began + TIMEOUT_S + seconds_for(num_bytes))

    def _connect(self, peer: _Peer) -> TimedConnection:
        """A connection for KV. When there is none, those who wait for one now need not find out again, each for itself."""
        try:
            connection = TimedConnection(peer.host, peer.port, self._seal, TIMEOUT_S)
        except Exception as problem:
            peer.failed, peer.failure = time.monotonic(), f"{problem}" or type(problem).__name__
            raise
        log.info("KV of %s can be read; its clock is %+.3f s off", peer.name, connection.clock_offset_s)
        return connection

    # ---- the thread of notices ----------------------------------------------------------------

    def _run_notices(self, peer: _Peer) -> None:
        connection: TimedConnection | None = None
        last, failed, over = -math.inf, False, False  # when beats were last sent, or tried to be
        while not over:
            every = self._heartbeat_every(peer, failed)
            drops, over = self._wait(peer, None if every is None else max(0.0, last + every - time.monotonic()))
            heartbeats = every is not None and time.monotonic() >= last + every
            for _ in range(2 if connection is not None else 1):  # one that went bad since its last use is made anew
                try:
                    if connection is None and (drops or heartbeats):
                        connection = TimedConnection(peer.host, peer.port, self._seal, TIMEOUT_S)
                    if connection is not None:
                        connection.within(TIMEOUT_S)
                        self._tell(connection, drops)
                        if heartbeats:
                            self._heartbeat(connection, peer)
                    break
                except Exception as problem:  # the border between one producer and all leases there
                    log.debug("%s did not take a notice: %s", peer.name, problem)
                    if connection is not None:
                        connection.close()
                        connection = None
            if heartbeats:
                last, failed = time.monotonic(), connection is None
        if connection is not None:
            connection.close()

    def _heartbeat_every(self, peer: _Peer, failed: bool) -> float | None:
        """How long after the last beat the next one is due, which a new lease may change; None: nothing is watched."""
        with peer.lock:
            shortest = min(peer.leases.values(), default=None)
        if shortest is None:
            return None
        return max(MIN_HEARTBEAT_S, min(shortest / HEARTBEATS, RETRY_S if failed else math.inf))

    def _wait(self, peer: _Peer, timeout_s: float | None) -> tuple[list[LeaseDrop], bool]:
        """Drops that came, after at most so long, and whether the end did."""
        drops: list[LeaseDrop] = []
        try:
            item = peer.ends.get(timeout=timeout_s)
            while item is not None:
                if item.lease:
                    drops.append(item)
                item = peer.ends.get_nowait()
        except queue.Empty:
            return drops, False
        return drops, True

    def _tell(self, connection: TimedConnection, drops: Sequence[LeaseDrop]) -> None:
        for done in (True, False):
            leases = [drop.lease for drop in drops if drop.done is done]
            for start in range(0, len(leases), MOST_KEYS):
                send(connection.socket, Return(tuple(leases[start : start + MOST_KEYS]), done))
                receive(connection.socket, Alive)

    def _heartbeat(self, connection: TimedConnection, peer: _Peer) -> None:
        with peer.lock:
            leases = tuple(peer.leases)
        for start in range(0, len(leases), MOST_KEYS):
            part = leases[start : start + MOST_KEYS]
            send(connection.socket, LeaseHeartbeat(part))
            answer = receive(connection.socket, Alive).good
            if len(answer) != len(part):
                raise WireError("an answer has another length than its question")
            for lease, alive in zip(part, answer, strict=True):
                if not alive:
                    self._lost.put(LeaseEvent(lease, LeaseNews.LOST))
