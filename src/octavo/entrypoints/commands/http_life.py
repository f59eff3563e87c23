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
from octavo.entrypoints.http.gate import Gate

CUT_S = 2.0  # for the errors to reach their clients


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: a clean stop exits with 0.

    Owns: what uvicorn owns.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Life:
    """Owns: the server and whether it was told to stop. To be made on the event loop."""

    def __init__(self, app: ASGIApp, gate: Gate, config: ServerConfig) -> None:
        self._gate = gate
        self._drain_timeout_s = config.drain_timeout_s
        self._config = uvicorn.Config(
            app,
            log_config=None,
            access_log=not config.disable_access_log,
            log_level=config.log_level,
            timeout_graceful_shutdown=int(CUT_S),
            loop="none",
        )
        self._http = _Server(self._config)
        self._stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)

    @property
    def stopping(self) -> bool:
        """True once a signal said so."""
        return self._stopping.is_set()

    def end(self) -> None:
        """Leave soon."""
        self._http.should_exit = True

    async def serve(self, listener: socket.socket, what: str) -> None:
        """Say that it is ready, and serve until the end."""
        drain = asyncio.create_task(self._drain())
        host, port = listener.getsockname()[:2]
        listener.listen(self._config.backlog)  # from the line on, whoever connects waits in line and is not refused
        sys.stderr.write(f"octavo: ready at http://{host}:{port}/v1 {what}\n")
        try:
            await self._http.serve(sockets=[listener])
        finally:
            drain.cancel()

    def _signalled(self) -> None:
        """First signal: stop admission and drain; second: leave at once."""
        if self._stopping.is_set():
            self._http.should_exit = self._http.force_exit = True
        self._stopping.set()

    async def _drain(self) -> None:
        """Let what runs end, refuse what comes, then close; what is left after the limit gets an error (OPS-10)."""
        await self._stopping.wait()
        self._gate.stop()
        limit_s = self._drain_timeout_s
        sys.stderr.write(f"octavo: stopping; {self._gate.num_active} requests may take up to {limit_s:g} s to finish\n")
        if not await self._gate.drained(limit_s):
            sys.stderr.write(f"octavo: {self._gate.cut()} requests were cut short\n")
            await self._gate.drained(CUT_S)
        self._http.should_exit = True
