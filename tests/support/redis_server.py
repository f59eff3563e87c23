"""A Redis or Valkey server of one's own, as a process.

Promises: `redis_server` gives one on a free port of loopback, without files, and ends it with its block; it may be
killed and started again on its port in between.
Does not know: who uses it. Needs the package redis, and one of the two programs (`SERVER` is None where there is none).
"""

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.ports import free_port

SERVER = shutil.which("redis-server") or shutil.which("valkey-server")
OPTIONS = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no")


class Server:
    """A server on loopback without files.

    Owns: its process.
    """

    def __init__(self, port: int, *options: str) -> None:
        self.port, self.options = port, options
        self.start()

    @property
    def address(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        import redis

        assert SERVER is not None, "neither redis-server nor valkey-server is installed"
        command = [SERVER, "--port", str(self.port), *OPTIONS, *self.options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            try:
                redis.Redis(port=self.port, socket_timeout=1).ping()
                return
            except redis.RedisError:
                time.sleep(0.02)
        raise RuntimeError("the server did not start")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@contextmanager
def redis_server(*options: str) -> Iterator[Server]:
    """A server for the time of a block."""
    made = Server(free_port(), *options)
    try:
        yield made
    finally:
        made.kill()
