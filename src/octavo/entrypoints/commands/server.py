"""The server behind `octavo serve`: its life from the engine's start to the last answer.

Promises: SIGTERM and Ctrl-C drain running requests within the limit and exit with 0; a dead engine ends the server
with 1, as does one that hangs for too long.
Does not know: routes (see `entrypoints.http.app`).
"""

import asyncio
import logging
import sys
from collections.abc import Callable
from functools import partial

from octavo.base.loops import new_event_loop
from octavo.config.schema import ServerConfig
from octavo.engine.client import InprocClient
from octavo.engine.dump import HangDump
from octavo.engine.spawn import Process
from octavo.entrypoints.commands.arguments import Call
from octavo.entrypoints.commands.console import progress, summary
from octavo.entrypoints.http.app import create_app
from octavo.http.life import Life
from octavo.http.opening import ServerOpening
from octavo.observe.stats import StatsLog
from octavo.serving.async_engine import AsyncEngine
from octavo.serving.info import EngineInfo
from octavo.serving.startup import OnlineFrontend, open_online

logger = logging.getLogger(__name__)

TELL_S = 0.5  # for errors to reach clients


def run(call: Call, config: ServerConfig, opening: ServerOpening, process: Process | None) -> int:
    """Start the engine in `process` (None: in this one) and serve on the open port; the exit code."""
    dump = HangDump("server", child=process)
    dump.describe = lambda: [f"starting: {opening.phases.now().phase}"]
    show = progress(began_s=opening.phases.began_s)
    online = open_online(call.given, show, call.env, process=process, enter=opening.phases.enter)
    dump.describe = partial(_state, online)
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_serve(online, config, opening, show))
    finally:
        online.close()


def _state(online: OnlineFrontend) -> list[str]:
    """What the server is at, and the engine if it is in this process, for who looks into a hang (OPS-3)."""
    client, stats = online.client, online.frontend.stats.snapshot
    heard = f"last heard of the engine: {stats.num_running} running, {stats.num_waiting} waiting"
    return [heard, *client.describe()] if isinstance(client, InprocClient) else [heard]


def sampling_line(info: EngineInfo) -> str:
    """Which sampling defaults are in force (INP-22)."""
    if not info.default_sampling:
        return "sampling defaults: neutral (temperature 1, nothing cut)"
    values = ", ".join(f"{name} {value}" for name, value in info.default_sampling.items())
    return f"sampling defaults from the model: {values} (--generation-config neutral turns them off)"


async def _serve(
    online: OnlineFrontend, server: ServerConfig, opening: ServerOpening, show: Callable[[str], None]
) -> int:
    app = create_app(online.frontend, server)
    life = Life(app, app.state.gate, server)
    await online.frontend.engine.start()
    watch = asyncio.create_task(_end_with(online.frontend.engine, life))
    metrics = asyncio.create_task(report_metrics(online.frontend.stats, server.stats_interval_s))
    try:
        for line in [*summary(online.report, opening.phases), sampling_line(online.frontend.info)]:
            show(line)
        opening.starting.hand_over()
        await life.serve(opening.listener, f"(model {online.frontend.info.served_names[0]})")
    finally:
        watch.cancel()
        metrics.cancel()
        died = not online.frontend.engine.alive() and not life.stopping
        await online.frontend.engine.stop()
    if died:
        sys.stderr.write("octavo: the engine died; the server has ended. See the lines above and start it again.\n")
        return 1
    return 0


async def report_metrics(stats_log: StatsLog, interval_s: float) -> None:
    """A line of figures after each interval in which there was work; none with 0 (OPS-3)."""
    while interval_s > 0:
        await asyncio.sleep(interval_s)
        if stats_log.has_news:
            logger.info("%s", stats_log.summary())
        else:
            stats_log.rates()  # the next line is of the time with work


async def _end_with(engine: AsyncEngine, life: Life) -> None:
    """End the server soon after the engine's death; open streams have got their error by then."""
    await engine.death()
    await asyncio.sleep(TELL_S)
    life.end()
