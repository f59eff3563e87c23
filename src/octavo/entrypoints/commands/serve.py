"""`octavo serve`: open the port, start the engine, serve until told to stop.

Promises: a port in use is said before anything slow, and from then on whoever asks is answered, 503 until the server is
ready; the engine's process starts before this one imports what a
server needs, so both import at once.
Does not know: the server (see `server`).
"""

import contextlib
import errno
import socket
from dataclasses import dataclass

from octavo.base.errors import ConfigError
from octavo.base.phases import Phases, process_began_s
from octavo.config.args import engine_config, server_config
from octavo.engine.spawn import process_ahead
from octavo.entrypoints.commands.arguments import Call
from octavo.entrypoints.http.starting import StartingPort
from octavo.observe.log import configure_logging
from octavo.plugins.registry import load_target

BACKLOG = 2048  # connections that may wait in line
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


@dataclass(frozen=True, slots=True)
class ServerOpening:
    """What a server that starts is handed: its open port, who answers there until then, and what it is busy with."""

    listener: socket.socket
    starting: StartingPort
    phases: Phases


def bind(host: str, port: int) -> socket.socket:
    """The listening address, open from before the model is loaded: who connects waits in line, and is not refused."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # Named, not 0: asyncio turns Nagle's algorithm off only on sockets that say they are TCP, and an answer in
        # two writes then waits 40 ms for the acknowledgement of the first.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(BACKLOG)  # two sockets that do not listen may have one address
        except BaseException:
            listener.close()
            raise
    except OverflowError:
        raise ConfigError(f"--port must be in 0..65535, got {port}.") from None
    except (socket.gaierror, UnicodeError, ValueError):  # not found, or not even a name
        raise ConfigError(f"--host {host!r:.60} is not an address of this machine.") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use; stop what uses it or choose another --port.") from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}.") from None
    return listener
