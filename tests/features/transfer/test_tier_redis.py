"""A real Redis server, well, gone, frozen, restarted, full, and something else that answers on its port (TIR-31)."""

import signal
import socket
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from octavo.base.errors import ConfigError
from octavo.features.transfer.address import parse_tier
from octavo.features.transfer.data.health import TierHealth
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.options import TransferOptions
from tests.features.transfer.test_offload import TURNS, run
from tests.support.redis_server import SERVER
from tests.support.redis_server import redis_server as server

redis = pytest.importorskip("redis", reason="the package redis is not installed")
from octavo.features.transfer.data import agent, tier_redis  # noqa: E402

needs_server = pytest.mark.skipif(SERVER is None, reason="neither redis-server nor valkey-server is installed")
LENGTH = 40_000
IDENTITY = {"model": "ours"}


def key(number, group=0):
    return bytes([number]) * 32 + group.to_bytes(4, "big")


def chunk(number):
    row = np.zeros(LENGTH + 64, dtype=np.uint8)
    row[:LENGTH] = np.random.default_rng(number).integers(0, 256, LENGTH, dtype=np.uint8)
    return row


class Rig:
    """A tier and its clock."""

    def __init__(self, address, identity=IDENTITY):
        self.now = 0.0
        self.tier = tier_redis.make(
            parse_tier(address), Seal(identity, [LENGTH]), TierHealth("redis", clock=lambda: self.now)
        )

    def write(self, *numbers):
        return self.tier.write([key(n) for n in numbers], [chunk(n) for n in numbers])

    def read(self, *numbers):
        rows = [np.zeros(LENGTH + 64, dtype=np.uint8) for _ in numbers]
        good = self.tier.read([key(n) for n in numbers], rows)
        for number, row, fine in zip(numbers, rows, good, strict=True):
            assert not fine or (row == chunk(number)).all()
        return good

    def find(self, *numbers):
        return self.tier.find([key(n) for n in numbers])


@needs_server
def test_engines_share_what_is_there_and_models_do_not(monkeypatch):
    monkeypatch.setattr(tier_redis, "BATCH_BYTES", 3 * LENGTH)  # several requests
    with server() as made:
        one, two = Rig(made.address), Rig(made.address)
        assert one.find(1, 2) == [False, False] and one.read(1) == [False]
        assert one.write(*range(1, 9)) == [True] * 8
        assert two.find(1, 9, 8) == [True, False, True]
        assert two.read(3, 9, *range(1, 9)) == [True, False] + [True] * 8
        assert Rig(made.address, {"model": "theirs"}).find(1) == [False]
        one.tier.close()


@needs_server
@pytest.mark.parametrize(
    "damage", [lambda v: v[:-1], lambda v: v + b"x", lambda v: b"", lambda v: v[:-9] + bytes([v[-9] ^ 1]) + v[-8:], lambda v: b"\0" * len(v)]
)  # fmt: skip
def test_what_is_not_as_it_was_written_is_a_miss_and_is_removed(damage):
    with server() as made:
        rig, client = Rig(made.address), redis.Redis(port=made.port)
        rig.write(1, 2)
        name = b"octavo:" + Seal(IDENTITY, [LENGTH]).space.encode() + b":" + key(1)
        client.set(name, damage(client.get(name)))
        assert rig.read(1, 2) == [False, True] and not client.exists(name)
        client.lpush(name, "a list")  # an error of one answer
        assert rig.read(1) == [False]
        rig.now += 10
        assert rig.read(2) == [True]


@needs_server
def test_a_server_that_is_gone_is_a_miss_at_once_and_is_found_again():
    with server() as made:
        rig = Rig(made.address)
        rig.write(1)
        made.kill()
        began = time.monotonic()
        assert rig.find(1) == [False] and rig.read(1) == [False] and rig.write(2) == [False]
        assert time.monotonic() - began < 2
        made.start()
        assert rig.write(2) == [False]  # left alone for a while
        rig.now += 10
        assert rig.write(2) == [True] and rig.read(1, 2) == [False, True]


@needs_server
def test_a_frozen_server_costs_one_timeout_and_no_more():
    with server() as made:
        rig = Rig(made.address)
        rig.write(1)
        made.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        assert rig.read(1) == [False]
        assert time.monotonic() - began < 3
        began = time.monotonic()
        assert rig.read(1, 2, 3) == [False] * 3 and rig.write(4) == [False]
        assert time.monotonic() - began < 0.5
        made.process.send_signal(signal.SIGCONT)
        rig.now += 10
        assert rig.read(1) == [True]


@needs_server
def test_a_full_server_refuses_and_keeps_answering():
    with server("--maxmemory", "2mb", "--maxmemory-policy", "noeviction") as made:
        rig = Rig(made.address)
        good = rig.write(*range(1, 60))
        assert False in good
        assert rig.read(*range(1, 60)) == good


@needs_server
def test_a_server_that_takes_nothing_is_read_from_and_the_log_says_once_what_to_do(caplog):
    """F39: full without leave to forget, a replica, a user who may not write."""
    with server("--maxmemory", "2mb", "--maxmemory-policy", "noeviction") as made:
        rig = Rig(made.address)
        good = rig.write(*range(1, 60))
        assert False in rig.write(*range(60, 100)) and rig.read(1) == [good[0]]
        (line,) = [record.getMessage() for record in caplog.records]
        assert "command not allowed" in line and "--maxmemory-policy allkeys-lru" in line
    with server() as made:
        rig, client = Rig(made.address), redis.Redis(port=made.port)
        rig.write(1)
        for command, said in (
            ("REPLICAOF 127.0.0.1 1", "name the primary server"),
            ("ACL SETUSER default -set", "needs the commands EXISTS, MGET, SET and DEL"),
        ):
            client.execute_command(*command.split())
            rig, before = Rig(made.address), len(caplog.records)
            assert rig.write(2) == [False] and rig.write(3, 4) == [False] * 2 and rig.read(1) == [True]
            (line,) = [record.getMessage() for record in caplog.records[before:]]
            assert "the server does not take blocks" in line and said in line
            client.execute_command("REPLICAOF", "NO", "ONE")


def test_something_else_on_the_port_is_a_miss():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def babble():
            with suppress(OSError):  # until the listener is closed
                for _ in range(3):
                    connection, _ = listener.accept()
                    connection.sendall(b"HTTP/1.1 400 what?\r\n\r\n" * 4)
                    connection.close()

        threading.Thread(target=babble, daemon=True).start()
        rig = Rig(f"redis://127.0.0.1:{listener.getsockname()[1]}/0")
        assert rig.find(1) == [False]
        rig.now += 10
        assert rig.read(1) == [False]


@needs_server
def test_an_engine_finds_what_another_left_and_its_text_is_the_same():
    plain = run(TURNS[:3])[0]
    with server() as made:
        tiers = ("host?size=4MiB", made.address)
        assert run(TURNS[:3], kv_tier=tiers)[0] == plain
        texts, sources, stats = run(TURNS[:3], kv_tier=tiers)
        assert texts == plain and all(source.get("redis", 0) >= 128 for source in sources)
        assert stats[f"{made.address}.failed_reads"] == 0
        made.kill()
        texts, sources, _ = run(TURNS[:3], kv_tier=tiers)
        assert texts == plain and not any("redis" in source for source in sources)
        made.start()


def test_without_the_package_the_start_says_what_to_install(monkeypatch):
    """Before any weights are read."""
    monkeypatch.setattr(tier_redis, "redis", None)
    with pytest.raises(ConfigError, match=r"needs the package redis: .* -m pip install"):
        agent.make(TransferOptions(kv_tier=("redis://127.0.0.1:1/0",)), {})
    with pytest.raises(ConfigError, match="give the server as redis://host:port/0"):
        parse_tier("redis:///0")
