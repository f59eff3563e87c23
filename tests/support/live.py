"""The whole engine behind a real HTTP server, in this process or in processes of its own.

Promises: `live` gives a server whose engine runs in this process (quick to start); `spawn` gives the real command.
Both end when their block ends.
Does not know: what is asked of them.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from octavo.base.types import UsageContext
from octavo.config.args import given_from_keywords, server_config
from octavo.config.env import read_env
from octavo.entrypoints.http.app import create_app
from octavo.plugins.features import server_sections
from octavo.serving.startup import open_online
from tests.support.http_server import serve_app

TIMEOUT_S = 120.0


@dataclass
class Live:
    """A server under test.

    Owns: its HTTP client.
    """

    url: str
    model: str
    process: "subprocess.Popen[str] | None" = None
    lines: list[str] = field(default_factory=list)  # what a process of its own has written to stderr
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=TIMEOUT_S)

    @property
    def openai(self) -> OpenAI:
        """The official client."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=TIMEOUT_S, max_retries=0)

    def post(self, path: str, **body: Any) -> httpx.Response:
        """POST JSON with the model's name."""
        return self.http.post(path, json={"model": self.model, **body})

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        answer = self.post("/v1/completions", prompt=prompt, **{"temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def text(self, prompt: Any, **body: Any) -> str:
        """The text of a completion."""
        return self.complete(prompt, **body)["choices"][0]["text"]

    def chat(self, content: Any, **body: Any) -> dict[str, Any]:
        """A chat completion that must succeed."""
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        answer = self.post("/v1/chat/completions", messages=messages, **{"temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """All chunks of a stream, checked for framing and the end mark."""
        with self.http.stream("POST", path, json={"model": self.model, "stream": True, **body}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in answer.iter_lines() if line and not line.startswith(":")]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1]]

    def streamed_text(self, prompt: Any, **body: Any) -> str:
        """The deltas of a streamed completion, joined."""
        events = self.events("/v1/completions", prompt=prompt, **{"temperature": 0, **body})
        return "".join(c["text"] for e in events for c in e["choices"])

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, summed over labels, by name."""
        found: dict[str, float] = {}
        for line in self.http.get("/metrics").text.splitlines():
            if match := re.fullmatch(r"(\w+)(\{.*\})? (\S+)", line):
                found[match[1]] = found.get(match[1], 0.0) + float(match[3])
        return found

    def wait_metrics(self, timeout_s: float = 5.0, **wanted: float) -> None:
        """Until these metrics have these values."""
        end = time.monotonic() + timeout_s
        while True:
            now = self.metrics()
            if all(now.get(f"octavo_{k}") == v for k, v in wanted.items()):
                return
            assert time.monotonic() < end, {k: now.get(f"octavo_{k}") for k in wanted}
            time.sleep(0.05)


@contextlib.contextmanager
def live(model: Path, **options: Any) -> Iterator[Live]:
    """A server with its engine in this process."""
    settings = {"model": str(model), "dtype": "float32", "block_size": 16, "multiprocessing": False, **options}
    given = given_from_keywords(settings, server_sections(), read_env())
    online = open_online(given, lambda line: None, read_env(), usage=UsageContext.TEST)
    engine = online.frontend.engine
    try:
        app = create_app(online.frontend, server_config(given))
        with serve_app(app, before=engine.start, after=engine.stop) as url:
            server = Live(url, online.frontend.info.served_names[0])
            try:
                yield server
            finally:
                server.http.close()
    finally:
        online.close()


@contextlib.contextmanager
def spawn(*args: str, env: dict[str, str] | None = None, start_s: float = 120.0) -> Iterator[Live]:
    """`octavo serve ARGS` as a process of its own on a free port; ended by SIGTERM."""
    command = [sys.executable, "-P", "-m", "octavo.entrypoints.cli", "serve", "--port", "0", *args]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})})
    lines: list[str] = []
    found: list[re.Match[str]] = []
    ready = threading.Event()

    def read() -> None:
        for line in process.stderr:
            lines.append(line)
            if match := re.search(r"ready at (http://\S+)/v1 \(model (.*)\)", line):
                found.append(match)
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(start_s) and found, "".join(lines)
        server = Live(found[0][1], found[0][2], process, lines)
        try:
            yield server
        finally:
            server.http.close()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(5)
        process.stderr.close()
