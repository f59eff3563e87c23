"""The real command under real signals: it drains, it ends with the right code, and nobody waits in silence (OPS-10, OPS-11)."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.support import checkpoints
from tests.support.http_server import wait_until
from tests.support.live import spawn

OPTIONS = ["--dtype", "float32", "--num-threads", "1", "--num-kv-blocks", "512", "--block-size", "16"]


def children(pid):
    """Process ids of the children of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(p) for p in (task / "children").read_text().split()]
    return found


class Reader(threading.Thread):
    """Reads one stream to its end.

    Owns: the events, and the error that ended the reading.
    """

    def __init__(self, server, max_tokens):
        super().__init__(daemon=True)
        self.server, self.max_tokens = server, max_tokens
        self.events, self.error, self.first = [], None, threading.Event()
        self.start()

    def run(self):
        body = {"prompt": "hello", "max_tokens": self.max_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
        try:
            with httpx.stream("POST", f"{self.server.url}/v1/completions", json=body, timeout=60) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line[6:])
                        self.first.set()
        except httpx.HTTPError as error:
            self.error = error
        self.first.set()

    def finish_reasons(self):
        texts = [json.loads(e) for e in self.events if e != "[DONE]"]
        return [c["finish_reason"] for e in texts for c in e.get("choices", []) if c["finish_reason"]]


def wait_exit(server, timeout_s):
    start = time.monotonic()
    code = server.process.wait(timeout_s)
    return code, time.monotonic() - start


@pytest.fixture
def server():
    with spawn(str(checkpoints.tiny_llama()), *OPTIONS, "--drain-timeout-s", "20") as server:
        yield server


def test_sigterm_lets_running_streams_end_and_exits_with_0(server):
    reader = Reader(server, 1900)
    assert reader.first.wait(20)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    refused = server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert server.http.get("/ready").status_code == 503
    reader.join(30)
    assert reader.error is None
    assert reader.events[-1] == "[DONE]"
    assert reader.finish_reasons() == ["length"]
    assert wait_exit(server, 15)[0] == 0


def test_what_is_left_after_the_drain_limit_is_told_so():
    with spawn(str(checkpoints.tiny_llama()), *OPTIONS, "--drain-timeout-s", "0.1") as server:
        reader = Reader(server, 1900)
        assert reader.first.wait(20)
        server.process.send_signal(signal.SIGTERM)
        code, seconds = wait_exit(server, 20)
        reader.join(5)
    assert code == 0
    assert seconds < 10
    assert reader.error is None, "the client reads an error event, not a torn connection"
    assert "error" in json.loads(reader.events[-1])


def test_a_second_signal_leaves_at_once(server):
    reader = Reader(server, 1900)
    assert reader.first.wait(20)
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    server.process.send_signal(signal.SIGINT)
    code, seconds = wait_exit(server, 15)
    assert code == 0
    assert seconds < 8
    assert not any("Traceback" in line for line in server.lines), server.lines  # F54


def test_a_killed_engine_ends_every_stream_with_an_error_and_the_server_with_1(server):
    readers = [Reader(server, 1900) for _ in range(4)]
    assert all(r.first.wait(20) for r in readers)
    (engine,) = children(server.process.pid)
    os.kill(engine, signal.SIGKILL)
    start = time.monotonic()
    for reader in readers:
        reader.join(10)
        assert not reader.is_alive(), "nobody waits in silence"
        assert reader.error is None
        assert "error" in json.loads(reader.events[-1])
    assert time.monotonic() - start < 5
    assert wait_exit(server, 10)[0] == 1


def test_one_signal_shows_where_every_thread_of_both_processes_stands(server):
    """OPS-3: stacks and state of the server and its engine, who both go on."""
    (engine,) = children(server.process.pid)
    os.kill(server.process.pid, signal.SIGUSR1)
    assert wait_until(lambda: any("KV pool: " in line for line in server.lines), 10), server.lines
    text = "".join(server.lines)
    assert text.count("Current thread") == 2
    assert f"process {server.process.pid} (server)" in text and f"process {engine} (engine)" in text
    assert "dump: no step was planned yet" in text and "dump: scheduler: 0 running, 0 waiting" in text
    assert server.text("hello", max_tokens=2), "both go on"


def test_the_engine_process_ends_with_a_killed_server(server):
    (engine,) = children(server.process.pid)
    server.process.kill()
    end = time.monotonic() + 25
    while Path(f"/proc/{engine}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{engine}").exists()
