"""`octavo serve`: open the port, start the engine, serve until told to stop.

Promises: a port in use is said before anything slow, and from then on whoever asks is answered, 503 until the server is
ready; the engine's process starts before this one imports what a
server needs, so both import at once.
Does not know: the server (see `server`).
"""

import contextlib

from octavo.base.phases import Phases, process_began_s
from octavo.config.args import engine_config, server_config
from octavo.engine.spawn import process_ahead
from octavo.entrypoints.commands.arguments import Call
from octavo.http.opening import ServerOpening, bind
from octavo.http.starting import StartingPort
from octavo.observe.log import configure_logging
from octavo.plugins.registry import load_target

SERVER = "octavo.entrypoints.commands.server:run"  # imported when the engine's process is on its way


def run(call: Call) -> int:
    """Serve until a signal or the engine's death."""
    phases = Phases("starting Python", process_began_s())
    phases.enter("importing")
    config = server_config(call.given)
    configure_logging(config.log_level)
    with (
        contextlib.closing(bind(config.host, config.port)) as listener,
        StartingPort(listener, phases.now) as starting,
    ):
        with process_ahead(engine_config(call.given).device.multiprocessing) as process:
            code: int = load_target(SERVER)(call, config, ServerOpening(listener, starting, phases), process)
        return code
