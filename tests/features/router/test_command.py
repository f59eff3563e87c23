"""`octavo route` as a process: it says what is wrong in a sentence, and stops as a server does (PDX-12, OPS-10)."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from octavo.config.args import options
from octavo.config.flags import Parser
from octavo.entrypoints.commands.arguments import add_arguments, commands, completed
from octavo.features.router.options import RouterOptions
from tests.support.fake_instance import FakeInstance
from tests.support.routed import read_event, words

START_S = 60.0


class Process:
    """A router in a process of its own.

    Owns: the process, and the thread that reads what it says.
    """

    def __init__(self, *args: str) -> None:
        command = [sys.executable, "-m", "octavo.entrypoints.cli", "route", *args]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line)
            if match := re.search(r"ready at (http://\S+)/v1 \(router of \d+\)", line):
                self.url = match[1]
                self._ready.set()
        self._ready.set()

    def wait_ready(self) -> None:
        assert self._ready.wait(START_S) and self.url, "".join(self.lines)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._reader.join(5)
        self.process.stderr.close()


@contextmanager
def routing(*args: str) -> Iterator[Process]:
    process = Process(*args)
    try:
        process.wait_ready()
        yield process
    finally:
        process.close()


def failing(*args: str, code: str | None = None) -> tuple[int, str]:
    """Exit code and what was said by a router that cannot start."""
    if code is None:
        command = [sys.executable, "-m", "octavo.entrypoints.cli", "route", *args]
    else:
        command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == ""
    return done.returncode, done.stderr.strip()


def test_it_routes_says_what_it_sees_and_ends_with_0():
    with FakeInstance("a") as a, FakeInstance("b") as b:
        b.stop()
        with routing("--plain", a.url, b.url, "--port", "0") as router:
            said = "".join(router.lines)
            assert f"octavo: {a.host} for plain: up\n" in said
            assert f"octavo: {b.host} for plain: down (it cannot be connected to: Connection refused)" in said
            answer = httpx.post(f"{router.url}/v1/completions", json={"prompt": "hi"}, timeout=20)
            assert answer.status_code == 200 and answer.headers["x-octavo-instance"] == a.host
            router.process.send_signal(signal.SIGTERM)
            assert router.process.wait(20) == 0


def test_a_stop_lets_a_running_stream_end_and_refuses_new_requests():
    with FakeInstance("a") as a, routing("--plain", a.url, "--port", "0") as router:
        a.behaviours.append("freeze in the stream")
        body = {"prompt": "hi", "stream": True}
        with httpx.stream("POST", f"{router.url}/v1/completions", json=body, timeout=20) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: "))
            events = [read_event(next(lines))]
            router.process.send_signal(signal.SIGTERM)
            ask = {"url": f"{router.url}/v1/completions", "json": {"prompt": "hi"}, "timeout": 20}
            statuses = (httpx.post(**ask).status_code for _ in range(1000))  # until the signal has arrived
            assert next(status for status in statuses if status != 200) == 503
            a.released.set()
            events += [read_event(line) for line in lines]
        assert words(events) == a.said() and events[-1] == "[DONE]"
        assert router.process.wait(20) == 0


def test_a_stop_cuts_what_does_not_end_in_time_with_an_error():
    with FakeInstance("a") as a, routing("--plain", a.url, "--port", "0", "--drain-timeout-s", "0.3") as router:
        a.behaviours.append("freeze in the stream")
        body = {"prompt": "hi", "stream": True}
        with httpx.stream("POST", f"{router.url}/v1/completions", json=body, timeout=20) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: "))
            next(lines)
            router.process.send_signal(signal.SIGTERM)
            (last,) = [read_event(line) for line in lines]
        assert last["error"]["code"] == "server_stopping"
        assert router.process.wait(20) == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "there is no server to route to; name some with --plain, or with --prefill and --decode."),
        (["--prefill", "http://a"], "--prefill needs --decode"),
        (["--plain", "10.0.0.1"], "--plain must be an address such as http://10.0.0.1:8000"),
        (["--plain", "http://a", "--health-interval-s", "0"], "--health-interval-s must be in"),
        (["--plain", "http://a", "--load-weight", "-1"], "--load-weight must not be negative"),
        (["--plain", "http://a", "--trust-request-chat-template"], "is for the servers behind the router"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(args, words):
    code, said = failing(*args)
    assert code in (1, 2) and said.startswith("octavo: ") and words in said and "\n" not in said


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = failing("--plain", "http://127.0.0.1:1", "--port", str(port))
    assert code == 1 and f"port {port} on 127.0.0.1 is in use" in said


PAGE = (Path(__file__).resolve().parents[3] / "docs" / "router.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^octavo ((?:route|serve) .*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_guide_is_understood(line):
    name, *args = shlex.split(line)
    parser = Parser(prog=f"octavo {name}")
    add_arguments(parser, completed(name, commands()[name]))
    parser.parse_args(args)


def test_the_guide_has_every_option_of_the_router():
    assert len(COMMANDS) == 4
    assert [o.flag for o in options({"router": RouterOptions}).values() if f"`{o.flag}" not in PAGE] == []


def test_options_come_from_the_environment_too():
    command = [sys.executable, "-m", "octavo.entrypoints.cli", "route"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "OCTAVO_PREFILL": "http://a"}
    )
    assert done.returncode == 1 and "--prefill needs --decode" in done.stderr
