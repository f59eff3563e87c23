"""F36: one deadline for a call as a whole, in every tier and transport, whatever trickles."""

import socket
import threading
import time

import numpy as np
import pytest

from octavo.features.transfer import wire
from octavo.features.transfer.address import parse_tier
from octavo.features.transfer.data import peer_server, session, tier_peer, timed
from octavo.features.transfer.data.connection import TimedConnection
from octavo.features.transfer.data.health import TierHealth
from octavo.features.transfer.data.ledger import RowLedger
from octavo.features.transfer.data.over_tcp import TcpFetch
from octavo.features.transfer.data.peer_server import PeerServer, RowService
from octavo.features.transfer.data.regions import HostRegion
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.data.session import Sessions
from octavo.features.transfer.data.timed import Deadline, TimedSocket
from octavo.features.transfer.data.transport import Pull
from octavo.features.transfer.disagg import LeaseDrop, LeaseWatch, PullJob
from tests.support.trickling import trickling

LENGTH = 40_000
SEAL = Seal({"model": "ours"}, [LENGTH])
LIMIT_S = 0.4
LATE_S = 3.0  # far beyond the limit, and far below what the trickle takes to end
KEYS = [bytes([n]) * 32 + bytes(4) for n in (1, 2)]


def frame(message):
    data = wire._ENCODER.encode(message)
    return wire.FRAME.pack(wire.MAGIC, len(data)) + data


def rows():
    return [np.zeros(LENGTH + 64, dtype=np.uint8) for _ in KEYS]


def after_welcome(answer):
    """Shakes hands as it should; what it answers then comes byte by byte."""

    def talk(connection):
        wire.receive_any(connection)
        wire.send(connection, wire.Welcome(now=0.0))
        wire.receive_any(connection)
        return answer

    return talk


SIZES = wire.ChunkSizes((SEAL.head_bytes(KEYS[0]) + LENGTH,) * 2)
PEERS = {
    "welcome": (lambda connection: frame(wire.Welcome()) * 100, "find"),
    "found": (after_welcome(frame(wire.FoundKeys((True,) * 2)) + b"x" * 500), "find"),
    "sizes": (after_welcome(frame(SIZES) + bytes(10_000)), "read"),
}


@pytest.mark.parametrize("talk, what", PEERS.values(), ids=PEERS)
def test_a_peer_that_trickles_costs_one_time_limit(talk, what, monkeypatch):
    """F36: a byte now and then does not stretch a call."""
    monkeypatch.setattr(tier_peer, "TIMEOUT_S", LIMIT_S)
    with trickling(talk) as server:
        health = TierHealth("peer")
        tier = tier_peer.PeerTier("127.0.0.1", server.port, SEAL, health)
        began = time.monotonic()
        got = tier.find(KEYS) if what == "find" else tier.read(KEYS, rows())
        if talk is PEERS["found"][0]:
            assert got in ([False] * 2, [True] * 2)  # the frame itself may just have come in time
        else:
            assert got == [False] * 2 and health.rests
        assert LIMIT_S / 2 < time.monotonic() - began < LATE_S
        tier.close()


REDIS = {
    "find": b"$" + b"9" * 10_000,  # a line that does not end
    "read": b"*2\r\n$%d\r\n" % LENGTH + bytes(LENGTH),
    "write": b"+" + b"O" * 10_000,
}


def redis_server(answer):
    """Agrees to everything that a client says at first, then lets its answer trickle."""

    def talk(connection):
        while True:
            said = connection.recv(65536)
            if not said:
                return b""
            if b"EXISTS" in said or b"MGET" in said or b"SET\r\n" in said:
                return answer
            hello = b"%1\r\n$5\r\nproto\r\n:3\r\n" if b"HELLO" in said else b"+OK\r\n" * said.count(b"*")
            connection.sendall(b"+PONG\r\n" if b"PING" in said else hello)

    return talk


@pytest.mark.parametrize("what", REDIS)
def test_a_redis_server_that_trickles_costs_one_time_limit(what, monkeypatch):
    """F36."""
    pytest.importorskip("redis", reason="the extra octavo[redis] is not installed")
    from octavo.features.transfer.data import tier_redis

    monkeypatch.setattr(tier_redis, "TIMEOUT_S", LIMIT_S)
    with trickling(redis_server(REDIS[what])) as server:
        health = TierHealth("redis")
        tier = tier_redis.make(parse_tier(f"redis://127.0.0.1:{server.port}/0"), SEAL, health)
        began = time.monotonic()
        got = {
            "find": lambda: tier.find(KEYS),
            "read": lambda: tier.read(KEYS, rows()),
            "write": lambda: tier.write(KEYS, rows()),
        }[what]()
        assert got == [False] * 2 and health.rests
        assert LIMIT_S / 2 < time.monotonic() - began < LATE_S
        tier.close()


@pytest.mark.parametrize("what", ["find", "read", "write"])
def test_an_s3_server_that_trickles_costs_one_time_limit_however_many_objects_are_asked_for(what, monkeypatch):
    """F36: the limit was one for each object that came."""
    pytest.importorskip("boto3", reason="the extra octavo[s3] is not installed")
    from octavo.features.transfer.data import tier_s3

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setattr(tier_s3, "STALL_S", LIMIT_S)
    monkeypatch.setattr(tier_s3, "SIDE_BY_SIDE", 1)

    def talk(connection):
        connection.recv(65536)
        return b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nx-long: "  # 45 bytes: one object takes twice the limit

    many = [bytes([n]) * 32 + bytes(4) for n in range(10)]
    with trickling(talk) as server:
        health = TierHealth("s3")
        tier = tier_s3.make(parse_tier(f"s3://kv?endpoint=http://127.0.0.1:{server.port}"), SEAL, health)
        began = time.monotonic()
        space = [np.zeros(LENGTH + 64, dtype=np.uint8) for _ in many]
        got = tier.find(many) if what == "find" else getattr(tier, what)(many, space)
        assert got == [False] * 10 and health.rests
        assert LIMIT_S / 2 < time.monotonic() - began < LATE_S
    tier.close()


def test_a_producer_that_trickles_costs_a_fetch_one_time_limit_and_no_other_fetch(monkeypatch):
    """F36, F37: a hand-over over TCP; a second prompt of the same producer does not wait behind the first."""
    monkeypatch.setattr(session, "TIMEOUT_S", LIMIT_S)
    answer = frame(wire.ChunkSizes((SEAL.head_bytes(wire.lease_key("l", 0, 0)) + LENGTH,))) + bytes(10_000)

    def talk(connection):
        wire.receive_any(connection)
        wire.send(connection, wire.Welcome(now=0.0))
        while not isinstance(wire.receive_any(connection), wire.FetchBlocks):
            wire.send(connection, wire.Alive((True,)))
        return answer

    with trickling(talk) as server:
        sessions, reports = Sessions(SEAL, TcpFetch(SEAL)), []
        sessions.watch(LeaseWatch(lease="l", address=f"tcp://127.0.0.1:{server.port}", lease_s=30.0))
        began = time.monotonic()
        for number in (1, 2, 3):
            job = PullJob(job=number, lease="l", places=((0,),), blocks=((1,),))
            sessions.pull(Pull(job, lambda *_: None, lambda report: reports.append((report, time.monotonic()))))
        while len(reports) < 3:
            assert time.monotonic() < began + 10
            time.sleep(0.005)
        assert all(report.error and not any(report.good) for report, _ in reports)
        assert max(when for _, when in reports) - began < LATE_S
        sessions.stop()


def test_a_notice_that_is_answered_a_byte_at_a_time_ends_in_time(monkeypatch):
    """F36: the end of an engine waits for what it tells producers."""
    monkeypatch.setattr(session, "TIMEOUT_S", LIMIT_S)
    with trickling(after_welcome(frame(wire.Alive((True,))) + b"x")) as server:
        sessions = Sessions(SEAL, TcpFetch(SEAL))
        sessions.watch(LeaseWatch(lease="l", address=f"tcp://127.0.0.1:{server.port}", lease_s=30.0))
        sessions.drop(LeaseDrop(lease="l", done=True))
        began = time.monotonic()
        sessions.stop()
        assert time.monotonic() - began < LATE_S


def test_a_reader_that_trickles_its_question_or_takes_nothing_is_hung_up_on(monkeypatch):
    """F36: the serving side, where each connection has a thread."""
    monkeypatch.setattr(peer_server, "SEND_S", LIMIT_S)
    host = HostRegion(64, LENGTH + 64)
    ledger = RowLedger(host)
    many = tuple(bytes([n]) * 32 + bytes(4) for n in range(64))
    for row, key in enumerate(many):
        ledger.begin(row)
        ledger.end(row, key)
    server = PeerServer("127.0.0.1", 0, SEAL, [RowService(ledger, SEAL)])

    def connected():
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        wire.send(connection, wire.Hello(version=wire.VERSION, identity=SEAL.identity))
        wire.receive(connection, wire.Welcome)
        return connection

    monkeypatch.setattr(timed, "LEAST_BYTES_PER_S", 100 << 20)
    with connected() as slow, connected() as deaf:
        wire.send(deaf, wire.Fetch(many * 8))  # 20 MB, of which nothing is taken
        began = time.monotonic()
        with pytest.raises(OSError):
            for byte in frame(wire.Find(many)):
                slow.sendall(bytes([byte]))
                time.sleep(0.02)
                assert time.monotonic() - began < LATE_S
        while server._connections:
            assert time.monotonic() - began < LATE_S
            time.sleep(0.01)
    server.close()
    host.close()


def test_no_thread_is_left_when_a_server_has_closed():
    """F37, TIR-19: threads of connections are joined, idle ones too."""
    host = HostRegion(1, LENGTH + 64)
    server = PeerServer("127.0.0.1", 0, SEAL, [RowService(RowLedger(host), SEAL)])
    open_ones = [TimedConnection("127.0.0.1", server.port, SEAL, 5.0) for _ in range(3)]
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("octavo-kv-peer")}
    assert len(threads) >= 4
    server.close()
    assert not any(thread.is_alive() for thread in threads)
    for connection in open_ones:
        connection.close()
    host.close()


def test_a_timed_socket_sends_and_hears_in_one_span():
    """F36."""
    here, there = socket.socketpair()
    deadline = Deadline()
    with TimedSocket.of(here, deadline) as line, there:
        there.sendall(b"ab")
        assert line.recv(1) == b"a"  # no limit yet
        line.within(0.2)
        assert line.recv(1) == b"b"
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            line.recv(1)
        assert time.monotonic() - began < 2
        with pytest.raises(TimeoutError, match="in time"):
            line.sendall(b"x")
        assert not deadline.is_ahead
        line.within(5)
        line.settimeout(0.05)  # a limit for a single call counts, too
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            line.recv(1)
        assert time.monotonic() - began < 3
