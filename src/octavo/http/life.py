"""The life of an HTTP server in a command, from its ready line to its last answer.

Promises: the first SIGTERM or Ctrl-C ends admission and lets what runs end within the limit (OPS-10), the second leaves
at once; a stop is clean, whatever the signal.
Does not know: what is served.
"""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from octavo.config.schema import ServerConfig
from octavo.http.connection import BoundedProtocol
from octavo.http.gate import Gate

SWITCH_S = 0.001  # a large body is parsed on a thread: streams get their turn after this, not after five times as long
CUT_S = 2.0  # for the errors to reach their clients
TICK_S = 1.0
UVICORN_TICK_S = 0.1  # what its counter counts


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, so that a clean stop exits with 0, and with a tenth of its ticks: an idle
    server sleeps.

    Owns: what uvicorn owns, and the end of its sleep.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._leaving = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def leave(self, *, at_once: bool = False) -> None:
        """End; `at_once` without waiting for connections."""
        self.should_exit = True
        self.force_exit = self.force_exit or at_once
        self._leaving.set()

    async def main_loop(self) -> None:
        """Tick (dates in headers change) until the end."""
        counter = 0
        while not await self.on_tick(counter):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._leaving.wait()
            counter += round(TICK_S / UVICORN_TICK_S)


class Life:
    """Owns: the server and whether it was told to stop. To be made on the event loop."""

    def __init__(self, app: ASGIApp, gate: Gate, config: ServerConfig) -> None:
        self._gate = gate
        self._drain_timeout_s = config.drain_timeout_s
        self._config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",  # our applications have none, and one that is cut short by a second signal writes a stack
            log_config=None,
            access_log=False,
            log_level=config.log_level,
            timeout_graceful_shutdown=int(CUT_S),
            loop="none",
        )
        self._http = _Server(self._config)
        self._stopping = asyncio.Event()
        sys.setswitchinterval(SWITCH_S)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)

    @property
    def stopping(self) -> bool:
        """True once a signal said so."""
        return self._stopping.is_set()

    def end(self) -> None:
        """Leave soon."""
        self._http.leave()

    async def serve(self, listener: socket.socket, what: str) -> None:
        """Say that it is ready, and serve on an open port until the end: who connects meanwhile waits in line."""
        drain = asyncio.create_task(self._drain())
        host, port = listener.getsockname()[:2]
        sys.stderr.write(f"octavo: ready at http://{host}:{port}/v1 {what}\n")
        try:
            await self._http.serve(sockets=[listener])
        finally:
            drain.cancel()

    def _signalled(self) -> None:
        """First signal: stop admission and drain; second: leave at once."""
        if self._stopping.is_set():
            self._http.leave(at_once=True)
        self._stopping.set()

    async def _drain(self) -> None:
        """Let what runs end, refuse what comes, then close; what is left after the limit gets an error (OPS-10)."""
        await self._stopping.wait()
        self._gate.stop()
        limit_s = self._drain_timeout_s
        try:
            sys.stderr.write(f"octavo: {stopping(self._gate.num_active, limit_s)}\n")
            if not await self._gate.drained(limit_s):
                sys.stderr.write(f"octavo: {self._gate.cut()} requests were cut short\n")
                await self._gate.drained(CUT_S)
        finally:  # whatever went wrong (nobody may read standard error any more), a stop is a stop
            self._http.leave()


def stopping(num_active: int, limit_s: float) -> str:
    """What a stop waits for, in words."""
    if not num_active:
        return "stopping; no request is running"
    what = "1 request" if num_active == 1 else f"{num_active} requests"
    return f"stopping; {what} may take up to {limit_s:g} s to finish (Ctrl-C or SIGTERM again ends them now)"
