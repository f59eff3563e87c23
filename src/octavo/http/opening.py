"""A server's port, open before anything slow: who connects waits in line, and is answered that it is starting.

Promises: a port in use, or an address of another machine, is said in one sentence.
Does not know: what is served. It is light, so that a command can open its port before it imports a server.
"""

import errno
import socket
from dataclasses import dataclass

from octavo.base.errors import ConfigError
from octavo.base.phases import Phases
from octavo.http.starting import StartingPort

BACKLOG = 2048  # connections that may wait in line


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
