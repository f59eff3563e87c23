"""A prefill and a decode engine as processes of their own, for tests of the hand-over between them.

Promises: `pair` gives both, ready, on free ports; `hand_over` does what a router does.
Does not know: what is done to the processes.
"""

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from tests.support import checkpoints
from tests.support.live import Live, spawn
from tests.support.ports import free_port

OPTIONS = ("--dtype", "float32", "--num-threads", "1", "--block-size", "16", "--num-kv-blocks", "200", "--seed", "0")


@contextlib.contextmanager
def producer(model: Path, *options: str) -> Iterator[Live]:
    """An engine that keeps prompts for others."""
    listen = f"127.0.0.1:{free_port()}"
    with spawn(str(model), *OPTIONS, "--kv-role", "producer", "--kv-listen", listen, *options) as server:
        yield server


@contextlib.contextmanager
def consumer(model: Path, *options: str) -> Iterator[Live]:
    """An engine that fetches prompts."""
    with spawn(str(model), *OPTIONS, "--kv-role", "consumer", *options) as server:
        yield server


@contextlib.contextmanager
def pair(*options: str, model: Path | None = None) -> Iterator[tuple[Live, Live]]:
    """Both."""
    path = model or checkpoints.tiny_llama()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:  # both start at once
        servers = [pool.submit(stack.enter_context, side(path, *options)) for side in (producer, consumer)]
        wait(servers)
        yield servers[0].result(), servers[1].result()


def prefill_only(server: Live, prompt: Any, **body: Any) -> dict[str, Any]:
    """The hint of a prompt that was computed and kept."""
    asked = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    hint: dict[str, Any] = server.complete(prompt, **asked)["kv_transfer_params"]
    return hint


def hand_over(prefill: Live, decode: Live, prompt: Any, **body: Any) -> dict[str, Any]:
    """An answer whose prompt was computed at the one engine and that was generated at the other."""
    return decode.complete(prompt, kv_transfer_params=prefill_only(prefill, prompt, **body), **body)


def figures(server: Live, feature: str = "disaggregation") -> dict[str, float]:
    """A feature's figures in the server's metrics; 0 for those that were not told yet."""
    text = server.http.get("/metrics").text
    pattern = rf'^octavo_feature_metric\{{.*?feature="{feature}".*?metric="([^"]*)".*?\}} (\S+)$'
    found = re.findall(pattern, text, re.MULTILINE)
    return defaultdict(float, {name: float(value) for name, value in found})


def signal_all(server: Live, sig: int) -> None:
    """A signal to the server and the engine that it has started."""
    assert server.process is not None
    for pid in (server.process.pid, *children(server.process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sig)


def children(pid: int) -> list[int]:
    """Process ids of the children of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return found
