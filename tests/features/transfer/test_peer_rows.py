"""Another engine's host memory read by NIXL, which TCP is the twin of (TIR-32).

An agent that copies within this process stands for NIXL in the tests of what can go wrong; the real one is used where
the package is installed.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from octavo import LLM
from octavo.base.errors import ConfigError
from octavo.features.transfer.address import parse_tier
from octavo.features.transfer.data import one_sided, tier_peer
from octavo.features.transfer.data.health import TierHealth
from octavo.features.transfer.data.ledger import RowLedger
from octavo.features.transfer.data.one_sided import FarMemory
from octavo.features.transfer.data.peer_rows import RowPointer
from octavo.features.transfer.data.peer_server import PeerServer, RowService
from octavo.features.transfer.data.regions import HostRegion
from octavo.features.transfer.data.seal import Seal
from tests.features.transfer.test_offload import BASE, GREEDY, TURNS, run
from tests.support import checkpoints
from tests.support.fake_nixl import Agent

LENGTHS = (70_001, 4096)  # by group
REASON = "the package nixl is not installed; it is an extra"
IDENTITY = {"model": "ours", "dtype": "bfloat16"}


def key(number, group=0):
    return bytes([number]) * 32 + group.to_bytes(4, "big")


def content(number, length):
    return np.random.default_rng(number).integers(0, 256, length, dtype=np.uint8)


class Rig:
    """A side that is read, and a tier that reads it, by `agent` or by TCP. Owns: both."""

    def __init__(self, agent, lengths=LENGTHS, rows=8, identity=IDENTITY):
        self.lengths = lengths
        self.seal = Seal(IDENTITY, lengths)
        self.host = HostRegion(rows, -(-max(lengths) // 64) * 64)
        self.ledger = RowLedger(self.host)
        self.pointer = RowPointer(self.ledger, self.host)
        self.server = PeerServer("127.0.0.1", 0, self.seal, [RowService(self.ledger, self.seal), self.pointer])
        self.health = TierHealth("a peer", rest_s=0.0)
        far = None if agent is None else FarMemory(agent, max(lengths))
        seal = Seal(identity, lengths)
        self.tier = tier_peer.PeerTier("127.0.0.1", self.server.port, seal, self.health, far)

    def put(self, row, number, group=0):
        self.ledger.begin(row)
        length = self.lengths[group]
        self.host[row][:length] = content(number, length)
        self.ledger.end(row, key(number, group))

    def read(self, *keys):
        """Which are good, and the rows."""
        rows = [np.zeros(self.host[0].nbytes, dtype=np.uint8) for _ in keys]
        good = self.tier.read(keys, rows)
        for k, row, fine in zip(keys, rows, good, strict=True):
            length = self.seal.length(k)
            assert not fine or (row[:length] == content(k[0], length)).all()
            assert not row[length:].any()  # nothing beyond the chunk
        return good

    def begin(self):
        """The side that is read starts NIXL when it is first asked."""
        self.read(key(99))
        end = time.monotonic() + 60
        while not self.pointer.reads_by_nixl:
            assert not self.pointer._never and time.monotonic() < end
            time.sleep(0.01)


@contextmanager
def rig(agent, **options):
    made = Rig(agent, **options)
    try:
        yield made
    finally:
        made.tier.close()
        made.server.close()


@pytest.fixture
def fake(monkeypatch):
    """The agent that copies here, on both sides."""
    agent = Agent()
    monkeypatch.setattr(one_sided, "nixl", object())
    monkeypatch.setattr(one_sided, "open_agent", lambda *_: agent)
    return agent


@pytest.fixture
def real():
    pytest.importorskip("nixl._api", reason=REASON, exc_type=ImportError)
    return one_sided.open_agent((), "a test")


def without_tcp(made, monkeypatch):
    """Whatever comes now came by NIXL."""
    monkeypatch.setattr(made.ledger, "copy_out", lambda *_: None)


def test_what_is_there_is_read_and_what_is_not_is_a_miss(fake, monkeypatch):
    with rig(fake) as made:
        for row in range(5):
            made.put(row, row + 1, row % 2)
        asked = [key(1), key(9), key(5), key(2, 1), key(2), key(1)]
        assert made.read(*asked) == [True, False, True, True, False, True]  # by TCP, until NIXL has begun
        made.begin()
        without_tcp(made, monkeypatch)
        assert made.read(*asked) == [True, False, True, True, False, True]
        assert made.tier.find(asked) == [True, False, True, True, False, True]
        assert not made.pointer._reading  # nobody reads any more


def test_many_chunks_take_several_landings_and_messages(fake, monkeypatch):
    monkeypatch.setattr(one_sided, "LANDING_BYTES", 150_000)
    monkeypatch.setattr("octavo.features.transfer.data.peer_rows.MOST_KEYS", 5)
    with rig(fake) as made:
        for row in range(8):
            made.put(row, row + 1)
        made.begin()
        without_tcp(made, monkeypatch)
        assert made.read(*(key(n) for n in (1, 2, 3, 4, 50, 5, 6, 7, 8))) == [True] * 4 + [False] + [True] * 4


def test_a_row_that_is_taken_while_it_is_read_is_a_miss_and_its_neighbour_is_not(fake, monkeypatch):
    """Before, between and after the halves of a copy, for the same key as well: nothing but the turn tells them apart."""
    with rig(fake) as made:
        made.begin()
        without_tcp(made, monkeypatch)
        for again in (2, 1):
            made.put(0, 1)
            made.put(1, 3)
            fake.meanwhile = lambda again=again: made.put(0, again)
            assert made.read(key(1), key(3)) == [False, True]
            fake.meanwhile = lambda: made.ledger.begin(0)
            made.put(0, 1)
            assert made.read(key(1), key(3)) == [False, True]
        fake.meanwhile = lambda: None
        made.put(0, 1)
        assert made.read(key(1), key(3)) == [True, True]


def churn(made, seconds):
    """Read while rows change all the time; how many were good, and how many not. What is good is compared."""
    stop, counts = threading.Event(), [0, 0]

    def change():
        number = 0
        while not stop.is_set():
            made.put(number % 2, number % 4 + 1)
            number += 1
            time.sleep(0.001)

    thread = threading.Thread(target=change)
    thread.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end or (not all(counts) and time.monotonic() < end + 30):
        for fine in made.read(*(key(n) for n in (1, 2, 3, 4))):
            counts[fine] += 1
    stop.set()
    thread.join()
    return counts


def test_rows_that_change_while_they_are_read_never_give_a_mixture(fake, monkeypatch):
    """In place of a lease: see record 22."""
    with rig(fake, rows=2) as made:
        made.begin()
        without_tcp(made, monkeypatch)
        assert all(churn(made, 0.5))


@pytest.mark.parametrize("way", ["UCX's own choice", "tcp"])
def test_rows_that_change_while_nixl_reads_them_never_give_a_mixture(way, monkeypatch):
    if way == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp,self")
    pytest.importorskip("nixl._api", reason=REASON, exc_type=ImportError)
    with rig(one_sided.open_agent((), "a test"), rows=2) as made:
        made.begin()
        without_tcp(made, monkeypatch)
        assert all(churn(made, 1.5))


@pytest.mark.parametrize("size", [1, 63, 64, 4097, 100_003, 3_000_001])
def test_nixl_and_tcp_give_the_same_bytes(real, size, monkeypatch):
    with rig(real, lengths=(size, 5), rows=5) as made:
        for row in range(4):
            made.put(row, row + 1)
        made.put(4, 5, 1)
        asked = [key(n) for n in (4, 2, 1, 3)] + [key(5, 1), key(9)]
        assert made.read(*asked) == [True] * 5 + [False]
        made.begin()
        without_tcp(made, monkeypatch)
        assert made.read(*asked) == [True] * 5 + [False]


def test_a_peer_without_nixl_sends_instead_and_says_so_once(fake, monkeypatch, caplog):
    monkeypatch.setattr(one_sided, "nixl", None)
    with rig(fake) as made:
        made.put(0, 1)
        assert made.read(key(1)) == made.read(key(1)) == [True]
        said = [r.getMessage() for r in caplog.records]
        assert len(said) == 1 and "read over TCP: there, that needs the package nixl: " in said[0]


def test_a_peer_whose_nixl_does_not_start_sends_instead(fake, monkeypatch, caplog):
    def fails(extents, option):
        raise ConfigError(f"{option}: NIXL does not start here: no device")

    with rig(fake) as made:
        monkeypatch.setattr(one_sided, "open_agent", fails)
        made.put(0, 1)
        end = time.monotonic() + 20
        while "read over TCP: there, reading host memory: NIXL does not start here" not in caplog.text:
            assert made.read(key(1)) == [True] and time.monotonic() < end


def test_another_model_is_refused_as_over_tcp(fake, caplog):
    with rig(fake, identity={**IDENTITY, "dtype": "float32"}) as made:
        made.put(0, 1)
        assert made.read(key(1)) == [False]
        assert "refused: dtype: bfloat16 there, float32 here" in caplog.text


@pytest.mark.parametrize("begins", [RuntimeError("no such memory"), "ERR"])
def test_a_read_that_fails_is_a_miss_and_the_next_one_may_work(fake, begins, caplog):
    with rig(fake) as made:
        made.put(0, 1)
        made.begin()
        fake.begins = begins
        assert made.read(key(1)) == [False] and "NIXL" in caplog.text
        fake.begins = "PROC"
        assert made.read(key(1)) == [True]


def test_a_read_that_does_not_end_costs_one_time_limit_and_writes_to_no_row(fake, monkeypatch, caplog):
    """TIR-32, PDX-9: what a frozen peer sends when it wakes goes where nobody looks."""
    monkeypatch.setattr(tier_peer, "TIMEOUT_S", 0.3)
    with rig(fake) as made:
        made.put(0, 1)
        made.begin()
        fake.state = "PROC"
        row = np.zeros(made.host[0].nbytes, dtype=np.uint8)
        began = time.monotonic()
        assert made.tier.read([key(1)], [row]) == [False]
        assert 0.1 < time.monotonic() - began < 5 and "did not read everything in time" in caplog.text
        assert made.read(key(1)) == [False]  # at once: nothing else is read there
        fake.wake()
        assert not row.any()
        fake.state = "DONE"
        assert made.read(key(1)) == [True]


READ = """
import sys
sys.path.insert(0, {root!r})
from tests.features.transfer.test_peer_rows import Rig, Agent
made = Rig(None, lengths=(3_000_000, 5), rows=32)
for row in range(32):
    made.put(row, row + 1)
print(made.server.port, flush=True)
sys.stdin.read()
"""


def test_a_peer_that_freezes_in_the_middle_writes_nothing_when_it_wakes_and_one_that_dies_is_a_miss(monkeypatch):
    """Over TCP UCX goes on with a transfer that was released: seen with NIXL 1.5."""
    pytest.importorskip("nixl._api", reason=REASON, exc_type=ImportError)
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(tier_peer, "TIMEOUT_S", 1.0)
    seal = Seal(IDENTITY, (3_000_000, 5))
    agent = one_sided.open_agent((), "a test")
    far = FarMemory(agent, seal.most_bytes)
    code = READ.format(root=os.getcwd())
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        tier = tier_peer.PeerTier(
            "127.0.0.1", int(other.stdout.readline()), seal, TierHealth("a peer", rest_s=0.0), far
        )
        keys = [key(n) for n in range(1, 33)]
        rows = [np.zeros(3_000_000, dtype=np.uint8) for _ in keys]
        end = time.monotonic() + 60
        while not far._names:
            assert all(tier.read(keys[:2], rows)) and time.monotonic() < end
        start = agent.transfer

        def freezes(handle):
            monkeypatch.setattr(agent, "transfer", start)
            other.send_signal(signal.SIGSTOP)
            return start(handle)

        monkeypatch.setattr(agent, "transfer", freezes)
        for row in rows:
            row[:] = 0
        began = time.monotonic()
        assert not any(tier.read(keys, rows)) and time.monotonic() - began < 60
        assert far._adrift and not any(row.any() for row in rows)
        other.send_signal(signal.SIGCONT)
        end = time.monotonic() + 60
        while not all(tier.read(keys, rows)):
            assert time.monotonic() < end
        assert all((row == content(n, 3_000_000)).all() for n, row in enumerate(rows, 1)) and not far._adrift
        other.kill()
        other.wait()
        assert not any(tier.read(keys, rows))
        tier.close()
    finally:
        other.kill()
        other.communicate()


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


def test_an_engine_reads_from_another_one_by_nixl_also_when_that_one_freezes_and_dies(monkeypatch):
    pytest.importorskip("nixl._api", reason=REASON, exc_type=ImportError)
    by_nixl, plain_read = [], FarMemory.read

    def counted(self, agent, chunks, has_time, take):
        by_nixl.append(len(chunks))
        plain_read(self, agent, chunks, has_time, take)

    monkeypatch.setattr(FarMemory, "read", counted)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    model = str(checkpoints.tiny_llama())
    code = CHILD.format(root=os.getcwd(), model=model, port=port)
    plain = run(TURNS[:3])[0]
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "ready\n"
        tiers = ("host?size=4MiB", f"peer://127.0.0.1:{port}?transport=nixl")
        end = time.monotonic() + 60
        while not sum(by_nixl):
            texts, sources, _ = run(TURNS[:3], kv_tier=tiers)
            assert texts == plain and all(source.get("peer", 0) >= 128 for source in sources)
            assert time.monotonic() < end
        with LLM(model=model, **BASE, kv_tier=tiers) as llm:
            other.send_signal(signal.SIGSTOP)
            assert llm.generate([TURNS[0]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == plain[0]
            other.kill()
            assert llm.generate([TURNS[1]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == plain[1]
    finally:
        other.kill()
        other.communicate()


def test_addresses_say_what_is_wrong(monkeypatch):
    assert parse_tier("peer://10.0.0.2:7100?transport=nixl").transport == "nixl"
    assert parse_tier("peer://10.0.0.2:7100?transport=nixl").name == "peer://10.0.0.2:7100"
    with pytest.raises(ConfigError, match="the transport is tcp or nixl, got 'rdma'"):
        parse_tier("peer://10.0.0.2:7100?transport=rdma")
    with pytest.raises(ConfigError, match="redis has no option 'transport'"):
        parse_tier("redis://10.0.0.2:7100?transport=nixl")
    monkeypatch.setattr(one_sided, "nixl", None)
    address = parse_tier("peer://10.0.0.2:7100?transport=nixl")
    want = (
        r"--kv-tier peer://.*transport=nixl needs the package nixl: .*pip install .*nixl.*; or leave out transport=nixl"
    )
    with pytest.raises(ConfigError, match=want):
        tier_peer.make(address, Seal(IDENTITY, LENGTHS), TierHealth("a peer"))
    with pytest.raises(ConfigError, match=want):
        LLM(model=str(checkpoints.tiny_llama()), **BASE, kv_tier=("host?size=4MiB", address.text))
