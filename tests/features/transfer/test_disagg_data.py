"""The data halves of a hand-over, over real sockets: fence, server, sessions (PDX-3, PDX-6, PDX-9, PDX-10)."""

import os
import queue
import resource
import socket
import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from octavo.features.transfer import wire
from octavo.features.transfer.data import over_tcp, peer_server, session
from octavo.features.transfer.data.guard import LeaseGuard
from octavo.features.transfer.data.over_tcp import TcpFetch, TcpProducerTransport
from octavo.features.transfer.data.peer_server import PeerServer
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.data.session import Sessions
from octavo.features.transfer.data.transport import Pull
from octavo.features.transfer.disagg import LeaseDrop, LeaseEvent, LeaseNews, LeaseWatch, PullJob
from tests.support.ports import free_port

SIZES = (70_000, 3_000)  # bytes of a block, by group
IDENTITY = {"model": "ours", "dtype": "bfloat16"}


def content(group, block):
    return np.random.default_rng(group * 1000 + block).integers(0, 256, SIZES[group], dtype=np.uint8)


class Region:
    """Blocks of one group, by shape what `regions.KVRegion` is."""

    def __init__(self, group):
        self.group, self.chunk_bytes = group, SIZES[group]
        self.gate = threading.Event()
        self.gate.set()
        self.reads = 0

    def read(self, block, row):
        self.reads += 1
        assert self.gate.wait(10)
        row[:] = content(self.group, block)


class Side:
    """A producer's data half."""

    def __init__(self, port=0, identity=IDENTITY, patience_s=1.0):
        self.guard = LeaseGuard(patience_s)
        self.regions = [Region(0), Region(1)]
        seal = Seal(identity, SIZES)
        self.identity = seal.identity
        self.server = PeerServer("127.0.0.1", port, seal, [TcpProducerTransport(self.guard, self.regions, seal)])
        self.port = self.server.port

    def wait_news(self, *wanted):
        """Until these notices came, in any order and with others between."""
        seen, end = [], time.monotonic() + 10
        while not set(wanted) <= set(seen):
            seen += self.guard.news()
            assert time.monotonic() < end, seen
            time.sleep(0.005)
        return seen


@contextmanager
def producer(**options):
    side = Side(**options)
    try:
        yield side
    finally:
        side.server.close()


class Reader:
    """A consumer's data half."""

    def __init__(self, identity=IDENTITY, clock=time.monotonic):
        seal = Seal(identity, SIZES)
        self.sessions = Sessions(seal, TcpFetch(seal), clock)
        self.got, self.done = {}, queue.SimpleQueue()
        self.numbers = iter(range(1, 1000))

    def watch(self, port, lease="l", lease_s=30.0):
        self.sessions.watch(LeaseWatch(lease=lease, address=f"tcp://127.0.0.1:{port}", lease_s=lease_s))

    def start(self, lease="l", places=((0, 1, 2), (0, 1))):
        blocks = tuple(tuple(place + 50 for place in row) for row in places)
        job = PullJob(job=next(self.numbers), lease=lease, places=places, blocks=blocks)
        self.sessions.pull(Pull(job, self._write, self.done.put))

    def _write(self, job, group, at, body):
        self.got[group, job.blocks[group][at]] = np.frombuffer(body, dtype=np.uint8)

    def pull(self, lease="l", places=((0, 1, 2), (0, 1)), timeout_s=20.0):
        self.start(lease, places)
        return self.done.get(timeout=timeout_s)


@contextmanager
def reader(**options):
    side = Reader(**options)
    try:
        yield side
    finally:
        side.sessions.stop()


TABLES = ((7, 8, 9), (4, 5))
DEEP = b"\x82\xa4type\xa6Chunks\xa1x" + b"\x91" * 100_000 + b"\x01"  # a list in a list in a list


def test_blocks_under_a_lease_come_whole():
    with producer() as side, reader() as mine:
        side.guard.open("l", TABLES)
        mine.watch(side.port)
        report = mine.pull()
        assert report.good == (True,) * 5 and report.error is None
        assert report.num_bytes == 3 * SIZES[0] + 2 * SIZES[1]
        for group, table in enumerate(TABLES):
            for place, block in enumerate(table):
                assert (mine.got[group, place + 50] == content(group, block)).all()
        mine.sessions.drop(LeaseDrop(lease="l", done=True))
        side.wait_news(LeaseEvent("l", LeaseNews.DONE))


def test_what_is_not_in_the_lease_does_not_come():
    with producer() as side, reader() as mine:
        side.guard.open("l", ((7, 0, 9), (4, 5)))
        mine.watch(side.port)
        report = mine.pull(places=((0, 1, 2, 3, -1), (0,)))
        assert report.good == (True, False, True, False, False, True) and report.error is None
        mine.watch(side.port, "another")
        assert mine.pull("another").good == (False,) * 5


def test_many_blocks_go_in_several_questions(monkeypatch):
    monkeypatch.setattr(over_tcp, "TAKE_AT_ONCE", 2)
    with producer() as side, reader() as mine:
        side.guard.open("l", (tuple(range(1, 8)), (4, 5)))
        mine.watch(side.port)
        assert mine.pull(places=(tuple(range(7)), (0, 1))).good == (True,) * 9


def test_a_closed_lease_is_not_read_and_one_that_is_being_read_closes_after_that():
    with producer() as side, reader() as mine:
        side.guard.open("l", TABLES)
        mine.watch(side.port)
        side.regions[0].gate.clear()
        mine.start()
        end = time.monotonic() + 10
        while not side.regions[0].reads and time.monotonic() < end:
            time.sleep(0.005)
        side.guard.close("l")
        assert LeaseEvent("l", LeaseNews.CLOSED) not in side.guard.news()  # somebody is at it
        side.regions[0].gate.set()
        side.wait_news(LeaseEvent("l", LeaseNews.CLOSED))
        report = mine.done.get(timeout=10)
        assert report.good == (True, False, False, False, False) and side.regions[0].reads == 1
        side.guard.close("unknown")
        assert side.guard.news() == (LeaseEvent("unknown", LeaseNews.CLOSED),)


def test_a_lease_is_kept_alive_while_it_is_watched_and_no_longer():
    with producer() as side, reader() as mine:
        side.guard.open("l", TABLES)
        side.guard.open("m", TABLES)
        mine.watch(side.port, "l", lease_s=0.3)
        mine.watch(side.port, "m", lease_s=30.0)
        for _ in range(3):
            side.wait_news(LeaseEvent("l", LeaseNews.HEARTBEAT), LeaseEvent("m", LeaseNews.HEARTBEAT))
        mine.sessions.drop(LeaseDrop(lease="l", done=False))
        side.wait_news(LeaseEvent("l", LeaseNews.ABORTED))
        time.sleep(0.3)
        assert LeaseEvent("l", LeaseNews.HEARTBEAT) not in side.guard.news()


def test_a_long_lease_does_not_keep_beats_from_a_short_one():
    with producer() as side, reader() as mine:
        side.guard.open("long", TABLES)
        side.guard.open("short", TABLES)
        mine.watch(side.port, "long", lease_s=3600.0)
        side.wait_news(LeaseEvent("long", LeaseNews.HEARTBEAT))
        mine.watch(side.port, "short", lease_s=0.3)
        side.wait_news(LeaseEvent("short", LeaseNews.HEARTBEAT))


def test_a_lease_of_next_to_no_time_does_not_fill_the_network_with_beats():
    with producer() as side, reader() as mine:
        side.guard.open("l", TABLES)
        mine.watch(side.port, "l", lease_s=1e-6)
        seen = list(side.wait_news(LeaseEvent("l", LeaseNews.HEARTBEAT)))
        time.sleep(0.5)
        assert len(seen + list(side.guard.news())) < 15


def test_a_lease_that_two_hints_have_at_two_addresses_is_not_kept_alive_when_it_is_over():
    with producer() as side, reader() as mine:
        side.guard.open("l", TABLES)
        mine.watch(side.port, "l", lease_s=0.3)
        side.wait_news(LeaseEvent("l", LeaseNews.HEARTBEAT))
        mine.watch(free_port(), "l", lease_s=0.3)
        mine.sessions.drop(LeaseDrop(lease="l", done=False))
        mine.sessions.drop(LeaseDrop(lease="l", done=False))
        side.wait_news(LeaseEvent("l", LeaseNews.ABORTED))
        time.sleep(0.3)
        assert LeaseEvent("l", LeaseNews.HEARTBEAT) not in side.guard.news()


def test_hints_with_ever_new_addresses_do_not_start_threads_without_end(monkeypatch):
    monkeypatch.setattr(session, "MOST_PEERS", 4)
    with reader() as mine:
        before = threading.active_count()
        for i in range(20):
            mine.watch(free_port(), f"idle-{i}")
            mine.sessions.drop(LeaseDrop(lease=f"idle-{i}", done=False))
        for i in range(20):
            mine.watch(free_port(), f"kept-{i}")
        assert len(mine.sessions) == 4
        lost = [event.lease for event in mine.sessions.news() if event.news is LeaseNews.LOST]
        assert {f"kept-{i}" for i in range(5, 20)} <= set(lost)
        assert mine.pull("kept-19").error
        end = time.monotonic() + 10
        while threading.active_count() > before + 8 and time.monotonic() < end:
            time.sleep(0.01)
        assert threading.active_count() <= before + 8


def test_a_lease_that_is_gone_there_is_reported_lost():
    with producer() as side, reader() as mine:
        mine.watch(side.port, lease_s=0.3)
        end, lost = time.monotonic() + 10, ()
        while not lost:
            lost = mine.sessions.news()
            assert time.monotonic() < end
            time.sleep(0.005)
        assert lost[0] == LeaseEvent("l", LeaseNews.LOST)


def test_notices_do_not_wait_for_kv():
    with producer() as side, reader() as mine:
        side.guard.open("l", TABLES)
        mine.watch(side.port, lease_s=0.3)
        side.regions[0].gate.clear()
        mine.start()
        for _ in range(3):
            side.wait_news(LeaseEvent("l", LeaseNews.HEARTBEAT))
        side.regions[0].gate.set()
        assert mine.done.get(timeout=10).good == (True,) * 5


def test_another_model_is_refused_by_name(caplog):
    with producer() as side, reader(identity={**IDENTITY, "dtype": "float32"}) as mine:
        side.guard.open("l", TABLES)
        mine.watch(side.port)
        report = mine.pull()
        assert not any(report.good) and report.error == "refused: dtype: bfloat16 there, float32 here"


def test_a_producer_that_is_gone_fails_the_fetch_at_once_and_one_that_came_back_is_found():
    side = Side()
    side.guard.open("l", TABLES)
    with reader() as mine:
        mine.watch(side.port)
        assert all(mine.pull().good)
        side.server.close()
        began = time.monotonic()
        report = mine.pull()
        assert not any(report.good) and report.error and time.monotonic() - began < 3
        with producer(port=side.port) as again:
            again.guard.open("l", TABLES)
            assert all(mine.pull().good)


def test_a_producer_that_freezes_fails_the_fetch_within_the_set_time(monkeypatch):
    monkeypatch.setattr(session, "TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener, reader() as mine:
        mine.watch(listener.getsockname()[1])
        began = time.monotonic()
        assert not any(mine.pull().good) and time.monotonic() - began < 3


def test_a_producer_that_trickles_fails_the_fetch_within_the_set_time(monkeypatch):
    monkeypatch.setattr(session, "PULL_S", 0.5)
    with producer() as side, reader() as mine:
        side.guard.open("l", (tuple(range(1, 9)), ()))
        region = side.regions[0]
        plain = region.read

        def slow(block, row):
            time.sleep(0.2)
            plain(block, row)

        region.read = slow
        mine.watch(side.port)
        report = mine.pull(places=(tuple(range(8)), ()))
        assert any(report.good) and not all(report.good) and "did not come in time" in report.error


def test_a_producer_that_trickles_within_a_block_fails_the_fetch_too(monkeypatch):
    monkeypatch.setattr(session, "PULL_S", 0.3)
    over = threading.Event()

    def trickle(connection):
        with connection, suppress(OSError, wire.WireError):
            wire.receive(connection, wire.Hello)
            wire.send(connection, wire.Welcome(now=0.0))
            wire.receive(connection, wire.FetchBlocks)
            seal, key = Seal(IDENTITY, SIZES), wire.lease_key("l", 0, 0)
            wire.send(connection, wire.ChunkSizes((seal.head_bytes(key) + SIZES[0],)))
            while not over.wait(0.02):
                connection.sendall(b"x")

    def serve(listener):
        with suppress(OSError):
            while True:
                threading.Thread(target=trickle, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener, reader() as mine:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        mine.watch(listener.getsockname()[1])
        try:
            report = mine.pull(places=((0,), ()), timeout_s=5.0)
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
        assert report.good == (False,) and "did not come in time" in report.error


def test_many_fetches_from_a_producer_that_freezes_fail_together(monkeypatch):
    monkeypatch.setattr(session, "TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0), backlog=50) as listener, reader() as mine:
        mine.watch(listener.getsockname()[1])
        began = time.monotonic()
        for _ in range(20):
            mine.start()
        for _ in range(20):
            assert mine.done.get(timeout=10).error
        assert time.monotonic() - began < 3


def test_whatever_goes_wrong_in_a_fetch_it_is_reported_and_the_next_one_is_made(caplog):
    with producer() as side, reader() as mine:
        side.guard.open("l", TABLES)
        mine.watch(side.port)
        write, mine._write = mine._write, lambda *_: 1 // 0
        assert "division" in mine.pull(timeout_s=5.0).error
        mine._write = write
        assert all(mine.pull().good)


@pytest.mark.parametrize(
    "answers",
    [
        [b"HTTP/1.1 400 Bad\r\n" * 9],
        ["welcome", wire.ChunkSizes((5, 5, 5))],
        ["welcome", wire.ChunkSizes((5,))],
        ["welcome", wire.Alive((True,))],
        ["welcome", b"OKV1\xff\xff\xff\xff"],
        ["welcome", wire.FRAME.pack(wire.MAGIC, len(DEEP)) + DEEP],
        ["welcome", b""],
    ],
    ids=["http", "sizes", "too few", "another kind", "endless", "deep", "nothing"],
)
def test_a_producer_that_answers_nonsense_fails_the_fetch(answers, monkeypatch):
    monkeypatch.setattr(session, "TIMEOUT_S", 1.0)

    def serve(listener):
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=talk, args=(connection,), daemon=True).start()

    def talk(connection):
        with connection, suppress(OSError, wire.WireError):
            for answer in answers:
                wire.receive_any(connection)
                if answer == "welcome":
                    wire.send(connection, wire.Welcome(now=0.0))
                elif isinstance(answer, bytes):
                    connection.sendall(answer)
                else:
                    wire.send(connection, answer)

    with socket.create_server(("127.0.0.1", 0)) as listener, reader() as mine:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        mine.watch(listener.getsockname()[1])
        report = mine.pull()
        assert not any(report.good) and report.error
        listener.shutdown(socket.SHUT_RDWR)


def test_engines_that_were_not_seen_for_long_are_forgotten_when_new_ones_appear():
    now = [0.0]
    with producer() as side, reader(clock=lambda: now[0]) as mine:
        side.guard.open("l", TABLES)
        mine.watch(side.port)
        mine.watch(free_port(), "x")
        mine.sessions.drop(LeaseDrop(lease="x", done=False))
        now[0] += session.TTL_S + 1
        mine.watch(free_port(), "y")
        assert len(mine.sessions) == 2  # the one whose lease is watched stays
        assert all(mine.pull().good)


def test_a_fetch_of_a_lease_that_somebody_gave_up_is_reported_too():
    with reader() as mine:
        mine.watch(free_port())
        mine.sessions.drop(LeaseDrop(lease="l", done=False))
        assert mine.pull().error == "its lease was given up"


def test_a_lease_that_is_asked_for_before_it_is_open_is_waited_for():
    with producer() as side, reader() as mine:
        mine.watch(side.port, lease_s=0.3)
        mine.start()
        time.sleep(0.1)
        side.guard.open("l", TABLES)
        assert all(mine.done.get(timeout=10).good)
        side.wait_news(LeaseEvent("l", LeaseNews.HEARTBEAT))
        assert mine.sessions.news() == ()
        side.guard.close("l")
        began = time.monotonic()
        with side.guard.reading("l") as tables:
            assert tables is None and time.monotonic() - began < 0.5  # known to be over


def test_leases_that_nobody_knows_are_waited_for_once_and_all_together():
    """A producer that was started anew hears of all that its consumers still watch."""
    with producer(patience_s=0.3) as side, reader() as mine:
        side.guard.open("l", TABLES)
        for i in range(100):
            mine.watch(side.port, f"old-{i}", lease_s=3.0)
        mine.watch(side.port, "l", lease_s=3.0)
        began = time.monotonic()
        side.wait_news(LeaseEvent("l", LeaseNews.HEARTBEAT))
        assert all(mine.pull("l").good)
        lost = set()
        while len(lost) < 100:
            lost |= {event.lease for event in mine.sessions.news()}
            assert time.monotonic() < began + 10
            time.sleep(0.005)
        assert "l" not in lost and time.monotonic() - began < 3
        began = time.monotonic()
        assert not any(mine.pull("old-7").good) and time.monotonic() - began < 0.3


def test_a_lease_that_was_waited_for_in_vain_is_given_once_it_is_there():
    guard = LeaseGuard(patience_s=0.01)
    assert guard.tell(("a", "b"), LeaseNews.HEARTBEAT) == (False, False)
    guard.open("a", TABLES)
    assert guard.tell(("a", "b"), LeaseNews.HEARTBEAT) == (True, False)
    with guard.reading("a") as tables:
        assert tables == TABLES


def test_a_moment_without_file_descriptors_does_not_shut_the_door(caplog):
    with producer() as side, reader() as mine, socket.socket() as early:
        side.guard.open("l", TABLES)
        free = os.dup(0)
        os.close(free)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            early.connect(("127.0.0.1", side.port))
            end = time.monotonic() + 10
            while "nobody can connect" not in caplog.text and side.server._thread.is_alive():
                assert time.monotonic() < end
                time.sleep(0.005)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        mine.watch(side.port)
        assert all(mine.pull().good)


def test_a_connection_that_says_hello_byte_by_byte_is_closed(monkeypatch):
    monkeypatch.setattr(peer_server, "SEND_S", 0.3)
    with producer() as side, socket.create_connection(("127.0.0.1", side.port), 10) as peer:
        peer.sendall(wire.FRAME.pack(wire.MAGIC, 1000))
        end = time.monotonic() + 3
        with pytest.raises(ConnectionError):
            while time.monotonic() < end:
                peer.sendall(b"\x81")
                time.sleep(0.05)


def test_a_name_of_a_lease_takes_no_room_to_speak_of():
    """Whoever connects may ask for many places of a lease; each is named in an answer's seal."""
    with producer(patience_s=0.01) as side, socket.create_connection(("127.0.0.1", side.port), 10) as peer:
        wire.send(peer, wire.Hello(version=wire.VERSION, identity=side.identity))
        wire.receive(peer, wire.Welcome)
        wire.send(peer, wire.FetchBlocks(lease="x" * 10_000, group=0, places=tuple(range(wire.MOST_KEYS))))
        with pytest.raises((wire.WireError, OSError)):
            wire.receive(peer, wire.ChunkSizes)
