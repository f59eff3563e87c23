"""The server behind `octavo serve`: its life from the engine's start to the last answer.

Promises: SIGTERM and Ctrl-C drain running requests within the limit and exit with 0; a dead engine ends the server
with 1.
Does not know: routes (see `entrypoints.http.app`).
"""

import asyncio
import contextlib
import faulthandler
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from octavo.base.loops import new_event_loop
from octavo.config.schema import ServerConfig
from octavo.engine.spawn import Process
from octavo.entrypoints.commands.arguments import Call
from octavo.entrypoints.commands.console import progress, summary
from octavo.entrypoints.http.app import create_app
from octavo.entrypoints.http.gate import Gate
from octavo.serving.info import EngineInfo
from octavo.serving.startup import OnlineFront, open_online

WATCH_S = 0.25
CUT_S = 2.0  # for the errors to reach their clients


def run(call: Call, config: ServerConfig, listener: socket.socket, process: Process | None) -> int:
    """Start the engine in `process` (None: in this one) and serve on `listener`; the exit code."""
    faulthandler.register(signal.SIGUSR1)  # where every thread stands, to standard error (OPS-3)
    show = progress()
    online = open_online(call.given, show, call.env, process=process)
    try:
        for line in [*summary(online.report), sampling_line(online.front.info)]:
            show(line)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_serve(online, config, listener))
    finally:
        online.close()


def sampling_line(info: EngineInfo) -> str:
    """Which sampling defaults are in force (INP-22)."""
    if not info.default_sampling:
        return "sampling defaults: neutral (temperature 1, nothing cut)"
    values = ", ".join(f"{name} {value}" for name, value in info.default_sampling.items())
    return f"sampling defaults from the model: {values} (--generation-config neutral turns them off)"


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: a clean stop exits with 0.

    Owns: what uvicorn owns.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(online: OnlineFront, server: ServerConfig, listener: socket.socket) -> int:
    app = create_app(online.front, server)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=not server.disable_access_log,
        log_level=server.log_level,
        timeout_graceful_shutdown=int(CUT_S),
        loop="none",
    )
    http = _Server(config)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _signalled, http, stopping)
    drain = asyncio.create_task(_drain(stopping, app.state.gate, http, server.drain_timeout_s))
    await online.front.engine.start()
    watch = asyncio.create_task(_watch(online, http))
    host, port = listener.getsockname()[:2]
    listener.listen(config.backlog)  # from the message on, whoever connects waits in line and is not refused
    sys.stderr.write(f"octavo: ready at http://{host}:{port}/v1 (model {online.front.info.served_names[0]})\n")
    try:
        await http.serve(sockets=[listener])
    finally:
        watch.cancel()
        drain.cancel()
        died = not online.front.engine.alive() and not stopping.is_set()
        await online.front.engine.stop()
    if died:
        sys.stderr.write("octavo: the engine died; the server has ended. See the lines above and start it again.\n")
        return 1
    return 0


def _signalled(http: uvicorn.Server, stopping: asyncio.Event) -> None:
    """First signal: stop admission and drain; second: leave at once."""
    if stopping.is_set():
        http.should_exit = http.force_exit = True
    stopping.set()


async def _drain(stopping: asyncio.Event, gate: Gate, http: uvicorn.Server, timeout_s: float) -> None:
    """Let what runs end, refuse what comes, then close; what is left after the limit gets an error (OPS-10)."""
    await stopping.wait()
    gate.stop()
    sys.stderr.write(f"octavo: stopping; {gate.num_active} requests may take up to {timeout_s:g} s to finish\n")
    if not await gate.drained(timeout_s):
        sys.stderr.write(f"octavo: {gate.cut()} requests were cut short\n")
        await gate.drained(CUT_S)
    http.should_exit = True


async def _watch(online: OnlineFront, http: uvicorn.Server) -> None:
    """End the server soon after the engine's death; open streams have got their error by then."""
    while online.front.engine.alive():
        await asyncio.sleep(WATCH_S)
    await asyncio.sleep(2 * WATCH_S)
    http.should_exit = True
