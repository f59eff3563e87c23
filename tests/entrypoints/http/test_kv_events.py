"""`GET /v1/kv/events` over real sockets: what is there, what changes, and how it ends (SCH-27)."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlparse

import httpx
import msgspec
import pytest

from octavo.base.outputs import CacheChanges, EngineOutputs
from octavo.config.schema import ServerConfig
from octavo.kvcache.published import Mirror, Note, Scheme
from octavo.serving.cache_feed import CacheFeed
from tests.entrypoints.http.events import check_error
from tests.entrypoints.http.toy_server import Served, toy_server
from tests.support.http_server import wait_until

SCHEME = Scheme(hash="sha256", hash_block_size=16, block_size=16)
HASHES = [i.to_bytes(32, "big") for i in range(40)]


def change(served: Served, **changes: object) -> None:
    """The engine says how its cache changed."""
    served.engine._on_outputs(EngineOutputs(cache=CacheChanges(**changes)))


class Following:
    """A reader of the stream.

    Owns: its mirror, and the lines that are no events.
    """

    def __init__(self, answer: httpx.Response) -> None:
        self.lines = answer.iter_lines()
        self.mirror = Mirror()
        self.comments: list[str] = []
        self.kinds: list[str] = []

    def until(self, kind: str) -> None:
        """Follow up to the next note of this kind."""
        for line in self.lines:
            if line.startswith(":"):
                self.comments.append(line)
            if line.startswith("data: "):
                note = msgspec.json.decode(line[6:], type=Note)
                self.mirror.follow(note)
                self.kinds.append(note.kind)
                if note.kind == kind:
                    return
        raise AssertionError(f"the stream ended after {self.kinds}")


@contextmanager
def following(served: Served) -> Iterator[Following]:
    with served.http.stream("GET", "/v1/kv/events") as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield Following(answer)


def test_where_nothing_is_recorded_the_answer_names_the_option(served: Served) -> None:
    error = check_error(served.http.get("/v1/kv/events"), 404)
    assert "--kv-events" in error["message"]


def test_a_follower_mirrors_the_cache() -> None:
    feed = CacheFeed(SCHEME, epoch="e1")
    with toy_server(feed=feed) as served:
        change(served, stored=tuple(HASHES[:3]))
        assert wait_until(lambda: len(feed) == 3)
        with following(served) as reader:
            reader.until("current")
            assert reader.kinds == ["description", "stored", "current"]
            assert reader.mirror.scheme == SCHEME and reader.mirror.hashes() == set(HASHES[:3])
            change(served, removed=(HASHES[0],))
            reader.until("removed")
            change(served, cleared=True, stored=(HASHES[9],))
            reader.until("stored")
            assert reader.mirror.hashes() == {HASHES[9]}
        with following(served) as again:
            again.until("current")
            assert again.mirror.hashes() == {HASHES[9]}


def test_events_are_json_that_anybody_can_read() -> None:
    with toy_server(feed=CacheFeed(SCHEME, epoch="e1")) as served:
        with served.http.stream("GET", "/v1/kv/events") as answer:
            lines = (line for line in answer.iter_lines() if line)
            first, second = json.loads(next(lines)[6:]), json.loads(next(lines)[6:])
        assert first == {
            "seq": 0, "epoch": "e1", "kind": "description",
            "scheme": {"hash": "sha256", "hash_block_size": 16, "block_size": 16},
        }  # fmt: skip
        assert second == {"seq": 1, "epoch": "e1", "kind": "current"}


def test_silence_is_commented() -> None:
    often = ServerConfig(stream_keep_alive_s=0.02)
    with toy_server(feed=CacheFeed(SCHEME), server=often) as served, following(served) as reader:
        reader.until("current")
        assert next(line for line in reader.lines if line).startswith(":")
        change(served, stored=(HASHES[0],))
        reader.until("stored")


def test_the_keys_of_the_server_guard_it() -> None:
    with toy_server(feed=CacheFeed(SCHEME), server=ServerConfig(api_key=("k",))) as served:
        check_error(served.http.get("/v1/kv/events"), 401)
        with served.http.stream("GET", "/v1/kv/events", headers={"authorization": "Bearer k"}) as answer:
            assert answer.status_code == 200


def test_a_head_request_ends() -> None:
    with toy_server(feed=CacheFeed(SCHEME)) as served:
        assert served.http.head("/v1/kv/events").status_code == 200


def test_a_reader_who_is_too_slow_is_cut_off_and_may_come_again() -> None:
    feed = CacheFeed(SCHEME, limit=50_000)
    with toy_server(feed=feed) as served:
        where = urlparse(served.url)
        with socket.create_connection((where.hostname, where.port), timeout=20) as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.sendall(b"GET /v1/kv/events HTTP/1.1\r\nHost: t\r\n\r\n")
            assert slow.recv(1)
            assert wait_until(lambda: len(feed._followers) == 1)
            for number in range(400):  # some 30 MB of events that nobody reads
                change(served, stored=tuple((1000 * number + i).to_bytes(32, "big") for i in range(1000)))
                if not feed._followers:
                    break
            assert wait_until(lambda: not feed._followers, 10.0)
            received = b"x"
            while received:  # what was under way, then the end
                try:
                    received = slow.recv(1 << 20)
                except ConnectionResetError:
                    break
        change(served, cleared=True, stored=(HASHES[0],))
        assert wait_until(lambda: len(feed) == 1)
        with following(served) as reader:
            reader.until("current")
            assert reader.mirror.hashes() == {HASHES[0]}


def test_followers_leave_the_feed_when_they_go() -> None:
    feed = CacheFeed(SCHEME)
    with toy_server(feed=feed) as served:
        with following(served) as reader:
            reader.until("current")
            assert len(feed._followers) == 1
        assert wait_until(lambda: not feed._followers)


@pytest.mark.parametrize("end", ["stop", "death"])
def test_the_stream_ends_with_admission_and_with_the_engine(end: str) -> None:
    with toy_server(feed=CacheFeed(SCHEME)) as served, following(served) as reader:
        reader.until("current")
        if end == "stop":
            served.app.state.gate.stop()
            assert httpx.get(f"{served.url}/ready").status_code == 503  # wakes the loop, as a signal does
        else:
            served.engine.kill()
        assert [line for line in reader.lines if line.startswith("data")] == []
