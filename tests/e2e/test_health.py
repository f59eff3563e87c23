"""Health that tells the truth: an engine that is frozen or hangs turns it red, one that goes on turns it green (EXE-3,
OPS-11)."""

import contextlib
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.support import checkpoints
from tests.support.disagg import children
from tests.support.http_server import wait_until
from tests.support.live import spawn
from tests.support.odd_connector import FOLDER, PATH

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ["--dtype", "float32", "--num-threads", "1", "--num-kv-blocks", "512", "--block-size", "16"]
PATIENCE_S = 12.0  # in which a health that should change must, beside busy neighbours; alone it takes 2


class Reader(threading.Thread):
    """Reads one long stream to its end.

    Owns: the events.
    """

    def __init__(self, server, max_tokens=1900):
        super().__init__(daemon=True)
        self.url, self.max_tokens = server.url, max_tokens
        self.events, self.first = [], threading.Event()
        self.start()
        assert self.first.wait(30)

    def run(self):
        body = {
            "prompt": [5, 6, 7],
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
        }
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line[6:])
                    self.first.set()

    def end(self):
        self.join(60)
        assert not self.is_alive(), "nobody waits in silence"
        return self.events[-1]


def probe(server, path="/health"):
    answer = server.http.get(path)
    return answer.status_code, answer.json().get("error", {}).get("code")


def seconds_until(server, status, code, path="/health"):
    """How long a probe takes to say this."""
    began_s = time.monotonic()
    assert wait_until(lambda: probe(server, path) == (status, code), PATIENCE_S), probe(server, path)
    return time.monotonic() - began_s


def idle_share(*pids, seconds=2.0):
    """Share of a core that these processes use."""
    before = sum(map(cpu_s, pids))
    time.sleep(seconds)
    return (sum(map(cpu_s, pids)) - before) / seconds


def cpu_s(pid):
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@contextlib.contextmanager
def serving(tmp_path, *options):
    env = {"PYTHONPATH": str(ROOT), FOLDER: str(tmp_path)}
    with spawn(str(checkpoints.tiny_llama()), *OPTIONS, "--kv-connector", PATH, *options, env=env) as server:
        (engine,) = children(server.process.pid)
        yield server, engine


def test_red_while_frozen_or_hung_and_green_again_with_the_whole_answer(tmp_path):
    """F30: SIGSTOP of the engine process left /health and /ready at 200."""
    with serving(tmp_path) as (server, engine):
        want = server.text([5, 6, 7], max_tokens=1900, ignore_eos=True)
        assert probe(server) == probe(server, "/ready") == probe(server, "/ping") == (200, None)
        assert min(idle_share(server.process.pid, engine) for _ in range(3)) < 0.01, "beats cost nothing that matters"

        os.kill(engine, signal.SIGSTOP)  # idle
        seconds_until(server, 503, "engine_silent")
        assert probe(server, "/ready") == (503, "engine_silent")
        os.kill(engine, signal.SIGCONT)
        seconds_until(server, 200, None)

        reader = Reader(server)
        os.kill(engine, signal.SIGSTOP)
        seconds_until(server, 503, "engine_silent")
        os.kill(engine, signal.SIGCONT)
        seconds_until(server, 200, None)
        reader.end()
        texts = [json.loads(e) for e in reader.events if e != "[DONE]"]
        assert "".join(c["text"] for e in texts for c in e["choices"]) == want

        (tmp_path / "hang").touch()
        waiting = threading.Thread(target=server.text, args=("hello",), kwargs={"max_tokens": 2})
        waiting.start()
        seconds_until(server, 503, "engine_silent", "/ready")
        (tmp_path / "hang").unlink()
        seconds_until(server, 200, None, "/ready")
        waiting.join(30)


@pytest.mark.parametrize("how", ["freeze", "hang"])
def test_beyond_the_limit_every_stream_ends_with_an_error_and_the_server_with_1(tmp_path, how):
    """F30: a frozen process, and a step that hangs."""
    with serving(tmp_path, "--hang-timeout-s", "3") as (server, engine):
        reader = Reader(server)
        if how == "freeze":
            os.kill(engine, signal.SIGSTOP)
        else:
            (tmp_path / "hang").touch()
        error = json.loads(reader.end())["error"]
        assert error["code"] == "engine_dead" and "--hang-timeout-s" in error["message"]
        assert server.process.wait(30) == 1
        assert not Path(f"/proc/{engine}").exists()
        log = "".join(server.lines)
        assert log.count("shows no sign of life") == 1 and "3 s (--hang-timeout-s)" in log
        if how == "hang":
            assert "odd_connector.py" in log, "the stacks say where it hung"
            assert "under way, planned " in log and "row: slot " in log, "and the state at what"


def test_a_step_that_computes_for_long_is_well(tmp_path):
    """F30: what is measured is progress, not the time of a step."""
    with serving(tmp_path, "--hang-timeout-s", "2") as (server, _):
        (tmp_path / "spin").touch()
        waiting = threading.Thread(target=server.text, args=("hello",), kwargs={"max_tokens": 2})
        waiting.start()
        for _ in range(20):
            assert probe(server) == (200, None)
            time.sleep(0.25)
        (tmp_path / "spin").unlink()
        waiting.join(30)


def test_a_draining_server_lives_and_is_not_ready(tmp_path):
    """F30: two questions, two answers."""
    with serving(tmp_path) as (server, _):
        reader = Reader(server)
        server.process.send_signal(signal.SIGTERM)
        seconds_until(server, 503, "server_stopping", "/ready")
        assert probe(server) == (200, None)
        assert reader.end() == "[DONE]"


@pytest.mark.parametrize("more", [[], ["--no-multiprocessing"]], ids=["processes", "one process"])
def test_a_step_that_hangs_can_be_looked_into_and_goes_on(tmp_path, more):
    """OPS-3: the stacks, the scheduler's state, and the batch of the step that hangs."""
    env = {"PYTHONPATH": str(ROOT), FOLDER: str(tmp_path)}
    options = [*OPTIONS, "--kv-connector", PATH, "--max-num-seqs", "1", "--no-async-scheduling", *more]
    with spawn(str(checkpoints.tiny_llama()), *options, env=env) as server:
        reader = Reader(server)
        waits = threading.Thread(target=server.text, args=("zebra",), kwargs={"max_tokens": 2})
        waits.start()
        server.wait_metrics(requests_running=1.0, requests_waiting=1.0)
        (tmp_path / "hang").touch()
        time.sleep(0.5)
        server.process.send_signal(signal.SIGUSR1)
        told = lambda: [line for line in server.lines if "octavo: dump: " in line]  # noqa: E731
        assert wait_until(lambda: any("  waiting: " in line for line in told()), PATIENCE_S), server.lines
        text = "".join(told())
        assert re.search(r"last step: \d+, under way, planned [\d.]+ s ago", text)
        assert re.search(r"batch: 1 rows, 1 tokens, 0 new rows", text)
        assert re.search(r"row: slot 0, \S+: positions (\d+) to \1, samples", text)
        assert "scheduler: 1 running, 1 waiting" in text
        assert re.search(r"KV pool: \d+ of 512 blocks free", text)
        assert re.search(r"running: \S+: slot 0, \d+ of \d+ tokens computed \(3 of the prompt", text)
        assert "odd_connector.py" in "".join(server.lines) and "zebra" not in text
        (tmp_path / "hang").unlink()
        reader.end()
        waits.join(30)
        assert not waits.is_alive()
