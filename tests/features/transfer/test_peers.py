"""Another engine's host memory as a tier, over real sockets (TIR-32, PDX-6)."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from octavo import LLM
from octavo.base.errors import ConfigError
from octavo.features.transfer import wire
from octavo.features.transfer.address import parse_tier
from octavo.features.transfer.data import peer_server, tier_peer
from octavo.features.transfer.data.health import TierHealth
from octavo.features.transfer.data.ledger import RowLedger
from octavo.features.transfer.data.peer_server import PeerServer, RowService
from octavo.features.transfer.data.regions import HostRegion
from octavo.features.transfer.data.seal import HEADER, Seal
from tests.features.transfer.test_offload import BASE, GREEDY, TURNS, run
from tests.support import checkpoints

LENGTH = 70_000
IDENTITY = {"model": "ours", "dtype": "bfloat16"}


READERS = []


@pytest.fixture(autouse=True)
def _connections_are_closed():
    yield
    while READERS:
        READERS.pop().tier.close()


def key(number):
    return bytes([number]) * 32 + bytes(4)


def content(number):
    return np.random.default_rng(number).integers(0, 256, LENGTH, dtype=np.uint8)


class Side:
    """What a producer has: rows, their ledger, and a server."""

    def __init__(self, rows=8, identity=IDENTITY, port=0):
        self.host = HostRegion(rows, LENGTH + 40)
        self.ledger = RowLedger(self.host)
        seal = Seal(identity, [LENGTH])
        self.server = PeerServer("127.0.0.1", port, seal, [RowService(self.ledger, seal)])

    def put(self, row, number):
        self.ledger.begin(row)
        self.host[row][:LENGTH] = content(number)
        self.ledger.end(row, key(number))


class Reader:
    """A tier with a clock of its own."""

    def __init__(self, port, identity=IDENTITY):
        self.now = 0.0
        READERS.append(self)
        self.tier = tier_peer.PeerTier(
            "127.0.0.1", port, Seal(identity, [LENGTH]), TierHealth("a peer", clock=lambda: self.now)
        )

    def read(self, *numbers):
        rows = [np.zeros(LENGTH + 40, dtype=np.uint8) for _ in numbers]
        good = self.tier.read([key(n) for n in numbers], rows)
        for number, row, fine in zip(numbers, rows, good, strict=True):
            assert not fine or (row[:LENGTH] == content(number)).all()
        return good

    def find(self, *numbers):
        return self.tier.find([key(n) for n in numbers])


@contextmanager
def producer(**options):
    side = Side(**options)
    try:
        yield side
    finally:
        side.server.close()


def test_what_is_there_is_found_and_read_whole():
    with producer() as side:
        for row in range(5):
            side.put(row, row + 1)
        reader = Reader(side.server.port)
        assert reader.find(1, 9, 5) == [True, False, True]
        assert reader.read(1, 9, 5, 2) == [True, False, True, True]
        assert reader.tier.write([key(1)], [content(1)]) == [False]
        reader.tier.close()


def test_many_keys_go_in_several_messages(monkeypatch):
    monkeypatch.setattr(tier_peer, "MOST_KEYS", 2)
    with producer() as side:
        for row in range(5):
            side.put(row, row + 1)
        reader = Reader(side.server.port)
        assert reader.find(1, 2, 3, 4, 5, 6, 7) == [True] * 5 + [False] * 2
        assert reader.read(5, 4, 9, 2, 1) == [True, True, False, True, True]


def test_a_row_that_is_taken_for_something_else_is_nobody_s_meanwhile():
    with producer() as side:
        side.put(0, 1)
        reader = Reader(side.server.port)
        side.ledger.begin(0)
        assert reader.find(1) == reader.read(1) == [False]
        side.put(0, 2)
        assert reader.read(1, 2) == [False, True]
        side.put(3, 2)  # the same chunk again, elsewhere
        side.ledger.begin(0)
        assert reader.read(2) == [True]


def test_rows_that_change_while_they_are_read_never_give_a_mixture():
    with producer(rows=2) as side:
        stop, reader, counts = threading.Event(), Reader(side.server.port), [0, 0]

        def churn():
            number = 0
            while not stop.is_set():
                side.put(number % 2, number % 6 + 1)
                number += 1
                time.sleep(0.0005)

        thread = threading.Thread(target=churn)
        thread.start()
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            for fine in reader.read(1, 2, 3, 4, 5, 6):  # compares what is good
                counts[fine] += 1
        stop.set()
        thread.join()
        assert counts[True] > 10 and counts[False] > 10


def test_another_model_is_refused_and_told_what_differs(caplog):
    with producer() as side:
        side.put(0, 1)
        reader = Reader(side.server.port, {**IDENTITY, "dtype": "float32"})
        assert reader.find(1) == [False] and reader.read(1) == [False]
        assert "refused: dtype: bfloat16 there, float32 here" in caplog.text
        assert len(caplog.records) == 1
        reader.now = 10
        reader.find(1)
        assert len(caplog.records) == 1  # said once


def test_a_peer_that_is_gone_is_a_miss_and_is_found_again():
    side = Side()
    side.put(0, 1)
    reader, port = Reader(side.server.port), side.server.port
    assert reader.read(1) == [True]
    side.server.close()
    began = time.monotonic()
    assert reader.read(1) == [False] and reader.find(1) == [False]
    assert time.monotonic() - began < 3
    with producer(port=port) as again:
        again.put(2, 1)
        assert reader.find(1) == [False]  # left alone for a while
        reader.now = 10
        assert reader.read(1) == [True]


def test_the_port_of_somebody_else_is_an_error_at_the_start():
    with producer() as side, pytest.raises(ConfigError, match=r"--kv-listen 127\.0\.0\.1:\d+: Address already in use"):
        Side(port=side.server.port)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        wire.FRAME.pack(wire.MAGIC, 0xFFFFFFFF),
        wire.FRAME.pack(wire.MAGIC, 3) + b"abc",
        wire.FRAME.pack(wire.MAGIC, 100) + b"cut",
        b"",
    ],
    ids=["http", "endless", "no message", "cut", "nothing"],
)
def test_nonsense_harms_nobody_else(said):
    with producer() as side:
        side.put(0, 1)
        reader = Reader(side.server.port)
        assert reader.read(1) == [True]
        # It may hang up before it has heard all.
        with socket.create_connection(("127.0.0.1", side.server.port), timeout=5) as connection, suppress(OSError):
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            assert not connection.recv(1000)
        assert reader.read(1) == [True]


def answering(*answers):
    """A listener that gives these bytes to whoever connects."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with suppress(OSError):
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(10_000)
                    connection.sendall(answer)
                    time.sleep(0.1)

    threading.Thread(target=serve, daemon=True).start()
    return listener


def frame(message):
    data = wire._ENCODER.encode(message)
    return wire.FRAME.pack(wire.MAGIC, len(data)) + data


def test_a_peer_that_answers_nonsense_is_a_miss(monkeypatch):
    monkeypatch.setattr(tier_peer, "TIMEOUT_S", 0.5)
    welcome = frame(wire.Welcome())
    with answering(
        b"HTTP/1.1 400 Bad\r\n" * 9,
        welcome + frame(wire.FoundKeys((True, True))),
        welcome + frame(wire.ChunkSizes((5,))),
        welcome + frame(wire.ChunkSizes((HEADER.size + 64 + 36 + LENGTH,))) + b"x" * 100,
        welcome + frame(wire.Welcome()),
        b"",
    ) as listener:
        reader = Reader(listener.getsockname()[1])
        for ask in (reader.find, reader.find, reader.read, reader.read, reader.read, reader.find):
            assert ask(1) == [False]
            reader.now += 10


class NoFiles:
    """A listener of a process that has no file descriptors left, for so many calls. Owns: their number."""

    def __init__(self, listener, failures):
        self.listener, self.failures, self.calls = listener, failures, 0

    def accept(self):
        self.calls += 1
        if self.calls <= self.failures:
            raise OSError(24, "Too many open files")
        return self.listener.accept()

    def __getattr__(self, name):
        return getattr(self.listener, name)


def test_a_server_that_can_accept_nobody_does_not_spin_says_so_once_and_serves_again(monkeypatch, caplog):
    """TIR-19: what goes wrong again and again takes longer and longer pauses, and one line; peers compute meanwhile."""
    monkeypatch.setattr(peer_server, "AGAIN_S", 0.02)
    plain = socket.create_server
    monkeypatch.setattr(peer_server.socket, "create_server", lambda address: NoFiles(plain(address), 6))
    began = time.monotonic()
    with producer() as side:
        side.put(0, 1)
        reader = Reader(side.server.port)
        assert reader.read(1) == [True]
        assert time.monotonic() - began > 0.02 * (2**6 - 1) * 0.9  # and not six times as long as one
        assert [r.getMessage().partition(": ")[2] for r in caplog.records] == [
            "nobody can connect: [Errno 24] Too many open files"
        ]


def test_a_server_that_is_in_a_pause_ends_at_once(monkeypatch):
    """TIR-19: joined before anything is torn down."""
    monkeypatch.setattr(peer_server, "AGAIN_S", 30.0)
    plain = socket.create_server
    monkeypatch.setattr(peer_server.socket, "create_server", lambda address: NoFiles(plain(address), 6))
    side = Side()
    began = time.monotonic()
    side.server.close()
    assert time.monotonic() - began < 4 and not side.server._thread.is_alive()


def test_that_the_machine_has_no_time_for_others_is_said_once(monkeypatch, caplog):
    """TIR-19: starved threads say so; they are still right."""
    monkeypatch.setattr(peer_server, "STARVED_S", 0.01)
    with producer() as side:
        for row in range(4):
            side.put(row, row + 1)
        plain = side.ledger.copy_out

        def late(key, length):
            time.sleep(0.03)
            return plain(key, length)

        monkeypatch.setattr(side.ledger, "copy_out", late)
        assert Reader(side.server.port).read(1, 2, 3, 4) == [True] * 4
    assert len(caplog.records) == 1 and "no time left for others" in caplog.text


CHILD = """
import sys
sys.path.insert(0, {root!r})
from tests.features.transfer.test_offload import BASE, GREEDY, TURNS
from octavo import LLM
with LLM(model={model!r}, **BASE, kv_tier=("host?size=4MiB",), kv_listen="127.0.0.1:{port}") as llm:
    for turn in TURNS[:3]:
        llm.generate([turn], GREEDY, use_tqdm=False)
    llm.generate([TURNS[0]], GREEDY, use_tqdm=False)
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_an_engine_reads_from_another_one_also_when_that_one_freezes_and_dies():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    model = str(checkpoints.tiny_llama())
    code = CHILD.format(root=os.getcwd(), model=model, port=port)
    plain = run(TURNS[:3])[0]
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "ready\n"
        tiers = ("host?size=4MiB", f"peer://127.0.0.1:{port}")
        texts, sources, stats = run(TURNS[:3], kv_tier=tiers)
        assert texts == plain and all(source.get("peer", 0) >= 128 for source in sources)
        assert stats[f"peer://127.0.0.1:{port}.bytes_read"] > 0 and stats[f"peer://127.0.0.1:{port}.bytes_written"] == 0
        with LLM(model=model, **BASE, kv_tier=tiers) as llm:
            other.send_signal(signal.SIGSTOP)
            assert llm.generate([TURNS[0]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == plain[0]
            other.kill()
            assert llm.generate([TURNS[1]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == plain[1]
    finally:
        other.kill()
        other.communicate()


def test_addresses_say_what_is_wrong():
    assert parse_tier("peer://10.0.0.2:7100").place == "10.0.0.2:7100"
    with pytest.raises(ConfigError, match="--kv-tier peer://somewhere: give host and port"):
        parse_tier("peer://somewhere")
