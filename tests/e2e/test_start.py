"""Starts as their users see them: what the port says meanwhile, what the summary accounts for, how a start ends early
(F69, OPS-5, OPS-10)."""

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from octavo.bench.serve import wait_started
from octavo.bench.startup import stages
from tests.support import checkpoints

OPTIONS = ["--dtype", "float32", "--num-threads", "1", "--max-model-len", "128", "--num-kv-blocks", "64"]
LIMIT_S = 120.0


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Start:
    """`octavo COMMAND ...` on a port that is known before.

    Owns: the process, and the thread that reads what it says.
    """

    def __init__(self, command: str, *args: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.began_s = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "octavo.entrypoints.cli", command, *args, "--port", str(self.port)],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.ready_s = 0.0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr:
            if "ready at" in line:
                self.ready_s = time.monotonic() - self.began_s
            self.lines.append(line.rstrip("\n"))

    def poll(self) -> Iterator[httpx.Response]:
        """Answers to one question asked again and again; nobody is there at first, and from the first answer on somebody
        always is."""
        there = False
        while time.monotonic() < self.began_s + LIMIT_S:
            try:
                answer = httpx.get(f"{self.url}/v1/models", timeout=30)
            except httpx.ConnectError:
                assert not there and self.process.poll() is None, self.lines
                time.sleep(0.005)
                continue
            there = True
            yield answer
        raise AssertionError(self.lines)

    def end(self) -> int:
        code = self.process.wait(30)
        self._reader.join(5)
        return code


@contextmanager
def starting(command: str, *args: str) -> Iterator[Start]:
    start = Start(command, *args)
    try:
        yield start
    finally:
        if start.process.poll() is None:
            start.process.send_signal(signal.SIGTERM)
        try:
            start.process.wait(30)
        except subprocess.TimeoutExpired:
            start.process.kill()
        start.end()
        start.process.stderr.close()


def until_ready(start: Start) -> list[str]:
    """The phases that a client was told of until the server was ready; nothing else was answered."""
    phases: list[str] = []
    for answer in start.poll():
        if answer.status_code == 200:
            break
        assert answer.status_code == 503 and answer.headers["retry-after"]
        told = answer.json()
        assert told["error"]["code"] == "starting"
        assert f"the server is starting: {told['phase']}, " in told["error"]["message"]
        if told["phase"] not in phases:
            phases.append(told["phase"])
    return phases


@pytest.mark.parametrize("more", [[], ["--no-multiprocessing"]], ids=["processes", "one process"])
def test_a_client_is_told_what_the_start_is_busy_with_and_phases_are_the_whole_time(more):
    with starting("serve", str(checkpoints.tiny_llama()), *OPTIONS, *more) as start:
        phases = until_ready(start)
        assert len(phases) >= 2 and phases[0] in ("starting Python", "importing")
        assert set(phases) <= set(stages(start.lines))
        accounted_s = sum(stages(start.lines).values())
        assert 0.9 * start.ready_s < accounted_s < 1.1 * start.ready_s, start.lines
        told = next(line for line in start.lines if "start-up in" in line)
        assert abs(float(re.search(r"start-up in ([\d.]+) s", told)[1]) - accounted_s) < 0.2
        for name in ("starting Python", "importing", "loading weights", "warming up", "opening the server"):
            assert name in told
        start.process.send_signal(signal.SIGTERM)
        assert start.end() == 0


def test_a_client_of_bench_waits_for_a_server_that_is_starting():
    said: list[str] = []
    with starting("serve", str(checkpoints.tiny_llama()), *OPTIONS) as start:
        next(start.poll())
        wait_started(start.url, said.append, timeout_s=LIMIT_S)
        assert httpx.get(f"{start.url}/health", timeout=30).status_code == 200
    assert len(said) == 1 and "the server is starting: " in said[0]


def test_a_router_that_looks_at_its_servers_says_so():
    with socket.socket() as silent:  # takes connections and never answers a check
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        server = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with starting("route", "--plain", server, "--health-timeout-s", "1") as start:
            first = next(start.poll())
            assert (first.status_code, first.json()["error"]["code"]) == (503, "starting")
            for answer in start.poll():
                if answer.json()["error"]["code"] != "starting":
                    break
            assert answer.json()["error"]["code"] == "no_instance"


def test_a_start_that_fails_after_its_port_is_open_ends_in_a_sentence_and_closes_it(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    with starting("serve", str(model)) as start:
        assert start.end() == 1
        assert start.lines[-1].startswith("octavo: ") and not any("Traceback" in line for line in start.lines)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", start.port), timeout=10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_start_at_once_and_nothing_is_left(number):
    with starting("serve", str(checkpoints.tiny_llama()), *OPTIONS) as start:
        next(start.poll())
        began_s = time.monotonic()
        start.process.send_signal(number)
        start.end()
        assert time.monotonic() - began_s < 10
        assert not start.ready_s and start.process.returncode != 0
        assert not any("Traceback" in line for line in start.lines)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", start.port), timeout=10)


def test_a_port_that_another_start_holds_is_told_before_anything_slow():
    with starting("serve", str(checkpoints.tiny_llama()), *OPTIONS) as start:
        next(start.poll())
        done = subprocess.run(
            [sys.executable, "-P", "-m", "octavo.entrypoints.cli", "serve", "--port", str(start.port)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 1
        assert done.stderr == (
            f"octavo: port {start.port} on 127.0.0.1 is in use; stop what uses it or choose another --port.\n"
        )
        assert until_ready(start) is not None  # the first one goes on
