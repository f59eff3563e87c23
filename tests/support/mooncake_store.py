"""A Mooncake store of one's own: its master, and a machine that gives it memory, as processes.

Promises: `mooncake_store` gives one on free ports of loopback, and ends it with its block; either may be killed and
started again in between.
Does not know: who uses it. Needs the package (`WHY_NOT` says what is missing, and is empty where nothing is).
"""

import importlib.util
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.ports import free_port


def _why_not() -> str:
    if importlib.util.find_spec("mooncake") is None:
        return "the package mooncake-transfer-engine-non-cuda is not installed"
    done = subprocess.run([sys.executable, "-P", "-c", "import mooncake.store"], capture_output=True, text=True)
    return "" if done.returncode == 0 else f"mooncake cannot be loaded here: {done.stderr.strip().splitlines()[-1]}"


WHY_NOT = _why_not()


class Store:
    """Owns: its processes."""

    def __init__(self, size: str) -> None:
        self.port, self.size = free_port(), size
        self.start_master()
        self.start_machine()

    @property
    def address(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}"

    def start_master(self) -> None:
        self.master = _run(
            "mooncake_master", "--rpc_address", "127.0.0.1", "--rpc_port", str(self.port),
            "--metrics_host", "127.0.0.1", "--metrics_port", str(free_port()),
        )  # fmt: skip
        until = time.monotonic() + 20
        while time.monotonic() < until:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.05)
        raise RuntimeError("the master did not start")

    def start_machine(self) -> None:
        """It gives the pool its memory; there is nothing in it yet."""
        self.machine = _run(
            "mooncake_client", "--host", "127.0.0.1", "--port", str(free_port()), "--metadata_server", "P2PHANDSHAKE",
            "--master_server_address", f"127.0.0.1:{self.port}", "--protocol", "tcp", "--global_segment_size", self.size,
        )  # fmt: skip

    def end(self) -> None:
        for process in (self.machine, self.master):
            process.kill()
            process.wait()


def _run(program: str, *options: str) -> "subprocess.Popen[bytes]":
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None and spec.origin is not None, WHY_NOT
    path = Path(spec.origin).with_name(program)
    if not path.stat().st_mode & stat.S_IXUSR:
        path.chmod(0o755)
    return subprocess.Popen(
        [path, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ)
    )


@contextmanager
def mooncake_store(size: str = "64 MB") -> Iterator[Store]:
    """A store for the time of a block."""
    made = Store(size)
    try:
        yield made
    finally:
        made.end()
