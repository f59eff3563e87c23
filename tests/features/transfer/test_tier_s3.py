"""A real server that speaks S3, well, gone, frozen, and others that babble, dribble or say nothing (TIR-31)."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from octavo.base.errors import ConfigError
from octavo.features.transfer.address import parse_tier
from octavo.features.transfer.control import pressure
from octavo.features.transfer.data.health import TierHealth
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.options import TransferOptions
from tests.features.transfer.test_offload import TURNS, run

boto3 = pytest.importorskip("boto3", reason="the package boto3 is not installed")
pytest.importorskip("moto", reason="moto is not installed")
pytest.importorskip("flask_cors", reason="moto's server needs flask and flask-cors")
from octavo.features.transfer.data import agent, tier_s3  # noqa: E402

LENGTH = 40_000
IDENTITY = {"model": "ours"}


@pytest.fixture(autouse=True)
def _credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """moto's server in a process of its own. Owns: the process."""

    def __init__(self, port):
        self.port = port
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def address(self):
        return f"s3://octavo-kv/some/prefix?endpoint={self.url}"

    def start(self):
        code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{self.port}'])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ}
        )
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(f"{self.url}/moto-api/data.json", timeout=2).close()
                break
            except urllib.error.HTTPError as answer:
                answer.close()
                break
            except OSError:
                assert self.process.poll() is None, "the server ended"
                time.sleep(0.05)
        else:
            raise RuntimeError("the server did not start")
        with self.client() as client:
            client.create_bucket(Bucket="octavo-kv")

    @contextmanager
    def client(self):
        client = boto3.session.Session().client("s3", endpoint_url=self.url, region_name="us-east-1")
        try:
            yield client
        finally:
            client.close()

    def names(self):
        with self.client() as client:
            return [each["Key"] for each in client.list_objects_v2(Bucket="octavo-kv").get("Contents", [])]

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def shared():
    """One server for the tests that leave it well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        made = Server(free_port())
    try:
        yield made
    finally:
        made.kill()


@pytest.fixture
def server(shared):
    """The same, empty."""
    with shared.client() as client:
        for name in shared.names():
            client.delete_object(Bucket="octavo-kv", Key=name)
    return shared


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
        self.tier = tier_s3.make(
            parse_tier(address), Seal(identity, [LENGTH]), TierHealth("s3", clock=lambda: self.now)
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.tier.close()

    def write(self, *numbers):
        return self.tier.write([key(n) for n in numbers], [chunk(n) for n in numbers])

    def read(self, *numbers):
        rows = [np.zeros(LENGTH + 64, dtype=np.uint8) for _ in numbers]
        good = self.tier.read([key(n) for n in numbers], rows)
        for number, row, fine in zip(numbers, rows, good, strict=True):
            assert (row == (chunk(number) if fine else 0)).all()
        return good

    def find(self, *numbers):
        return self.tier.find([key(n) for n in numbers])


def test_engines_share_what_is_there_and_models_do_not(server):
    with Rig(server.address) as one, Rig(server.address) as two, Rig(server.address, {"model": "theirs"}) as other:
        assert one.find(1, 2) == [False, False] and one.read(1) == [False]
        assert one.write(*range(1, 21)) == [True] * 20  # more than go side by side
        assert one.write(3) == [True]
        assert two.find(1, 99, 20) == [True, False, True]
        assert two.read(3, 99, *range(1, 21)) == [True, False] + [True] * 20
        assert other.find(1) == [False]
        space = Seal(IDENTITY, [LENGTH]).space
        assert f"some/prefix/{space}/01/{key(1).hex()}.kv" in server.names() and len(server.names()) == 20


def test_many_keys_are_looked_up_in_the_list_and_the_rest_one_by_one(server, monkeypatch):
    monkeypatch.setattr(tier_s3, "MANY", 4)
    asked = []
    with Rig(server.address) as rig:
        rig.write(1, 2, 3, 200, 201)
        rig.tier._client.put_object(Bucket="octavo-kv", Key=rig.tier._place(key(100))["Key"], Body=b"foreign")
        plain = rig.tier._client.head_object, rig.tier._client.list_objects_v2
        monkeypatch.setattr(rig.tier._client, "head_object", lambda **it: asked.append(it["Key"]) or plain[0](**it))
        numbers = [1, 5, 3, 100, 200, 201, 202, 2]
        there = [True, False, True, False, True, True, False, True]
        assert rig.find(*numbers) == there and asked == []  # one page tells all
        monkeypatch.setattr(rig.tier._client, "list_objects_v2", lambda **it: plain[1](**it, MaxKeys=2))
        assert rig.find(*numbers) == there
        assert len(asked) == 3 and all(name > rig.tier._place(key(100))["Key"] for name in asked)  # two pages of two
        assert rig.find(1, 7) == [True, False] and len(asked) == 5


@pytest.mark.parametrize(
    "damage", [lambda v: v[:-1], lambda v: v + b"x", lambda v: b"", lambda v: v[:-9] + bytes([v[-9] ^ 1]) + v[-8:], lambda v: b"\0" * len(v)]
)  # fmt: skip
def test_what_is_not_as_it_was_written_is_a_miss_and_is_removed(server, damage):
    with Rig(server.address) as rig, server.client() as client:
        rig.write(1, 2)
        (name,) = [n for n in server.names() if key(1).hex() in n]
        data = client.get_object(Bucket="octavo-kv", Key=name)["Body"].read()
        client.put_object(Bucket="octavo-kv", Key=name, Body=damage(data))
        assert rig.read(1, 2) == [False, True] and name not in server.names()
        assert rig.write(1) == [True] and rig.read(1) == [True]


def test_an_object_of_another_size_is_not_found_and_is_written_over(server):
    with Rig(server.address) as rig, server.client() as client:
        rig.write(1)
        (name,) = server.names()
        client.put_object(Bucket="octavo-kv", Key=name, Body=b"something else")
        assert rig.find(1) == [False]
        assert rig.write(1) == [True] and rig.read(1) == [True]


def test_a_bucket_that_is_not_there_makes_misses_and_is_named(server, caplog):
    with Rig(f"s3://no-such-bucket?endpoint={server.url}") as rig:
        assert rig.find(1) == [False] and rig.write(1) == [False]
        assert "NoSuchBucket" in caplog.text
        assert rig.read(1) == [False]


def test_a_server_that_is_gone_is_a_miss_at_once_and_is_found_again():
    made = Server(free_port())
    try:
        with Rig(made.address) as rig:
            assert rig.write(1) == [True]
            made.kill()
            began = time.monotonic()
            assert rig.find(1) == [False] and rig.read(1) == [False] and rig.write(2) == [False]
            assert time.monotonic() - began < 3
            made.start()
            assert rig.write(2) == [False]  # left alone for a while
            rig.now += 10
            assert rig.write(2) == [True] and rig.read(1, 2) == [False, True]
    finally:
        made.kill()


def test_a_frozen_server_costs_one_timeout_and_no_more():
    made = Server(free_port())
    try:
        with Rig(made.address) as rig:
            rig.write(1)
            made.signal(signal.SIGSTOP)
            began = time.monotonic()
            assert rig.read(1) == [False]
            assert time.monotonic() - began < tier_s3.STALL_S + 1
            began = time.monotonic()
            assert rig.read(1, 2, 3) == [False] * 3 and rig.write(4) == [False] and rig.find(1) == [False]
            assert time.monotonic() - began < 0.5
            made.signal(signal.SIGCONT)
            rig.now += 10
            assert rig.read(1) == [True]
    finally:
        made.kill()


@contextmanager
def answering(answer):
    """A listener whose connections each get `answer(connection)` on a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        over = threading.Event()

        def serve(connection):
            with connection, suppress(OSError):
                answer(connection, over)

        def accept():
            with suppress(OSError):
                while not over.is_set():
                    connection, _ = listener.accept()
                    threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"s3://bucket?endpoint=http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


HEAD = len(Seal(IDENTITY, [LENGTH]).head(key(1), memoryview(b"")))


def babble(connection, over):
    connection.recv(65536)
    connection.sendall(b"what do you want?\r\n\r\n" * 50)


def noise(connection, over):
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\n" + b"\xff" * 40)


def nonsense(connection, over):
    connection.recv(65536)
    size = HEAD + LENGTH
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"\xff" * size)
    over.wait(10)


def cut(connection, over):
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (HEAD + LENGTH) + b"x" * 100)


def broken(connection, over):
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 500 Oh no\r\nContent-Length: 7\r\n\r\n<xml oh")


def silence(connection, over):
    over.wait(30)


def dribble(connection, over):
    """A header that never ends; there is always a byte before the client loses patience."""
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while not over.wait(0.1):
        connection.sendall(b"x")


@pytest.mark.parametrize("answer", [babble, noise, nonsense, cut, broken, silence, dribble], ids=lambda f: f.__name__)
def test_whatever_answers_it_is_a_miss_within_a_set_time(answer, monkeypatch):
    monkeypatch.setattr(tier_s3, "READ_S", 0.5)
    monkeypatch.setattr(tier_s3, "STALL_S", 1.0)
    with answering(answer) as address, Rig(address) as rig:
        for ask in (rig.read, rig.write, rig.read):
            began = time.monotonic()
            good = ask(1, 2, 3)
            assert good == [False] * 3 or (
                ask == rig.write and answer in (noise, nonsense, cut)
            )  # it said that it has it
            assert time.monotonic() - began < 3
            rig.now += 10


def test_an_engine_finds_what_another_left_and_its_text_is_the_same(server, monkeypatch):
    monkeypatch.setattr(pressure, "LEAST_BYTES", 1 << 30)  # this server is slow, and would get fewer stores
    plain = run(TURNS[:3])[0]
    tiers = ("host?size=4MiB", server.address)
    name = "s3://octavo-kv/some/prefix"
    assert run(TURNS[:3], kv_tier=tiers)[0] == plain
    texts, sources, stats = run(TURNS[:3], kv_tier=tiers)
    assert texts == plain and all(source.get("s3", 0) >= 128 for source in sources)
    assert stats[f"{name}.failed_reads"] == 0 and stats[f"{name}.hits"] > 20


def test_an_engine_whose_bucket_is_gone_computes():
    plain = run(TURNS[:2])[0]
    texts, sources, _ = run(TURNS[:2], kv_tier=("host?size=4MiB", f"s3://b?endpoint=http://127.0.0.1:{free_port()}"))
    assert texts == plain and not any("s3" in source for source in sources)


def test_without_the_package_the_start_says_what_to_install(monkeypatch):
    """Before any weights are read."""
    monkeypatch.setattr(tier_s3, "boto3", None)
    with pytest.raises(ConfigError, match=r"needs the package boto3: .* -m pip install"):
        agent.make(TransferOptions(kv_tier=("s3://bucket",)), {})


def test_without_credentials_the_start_says_what_to_set(monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no credentials were found; set AWS_ACCESS_KEY_ID"):
        agent.make(TransferOptions(kv_tier=("s3://bucket",)), {})
