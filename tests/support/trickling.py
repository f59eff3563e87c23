"""A server on loopback that answers a byte at a time: never silent, never done."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

Talk = Callable[[socket.socket], bytes]


class Trickle:
    """Owns: the listener, its threads, and how many connections came."""

    def __init__(self, talk: Talk, every_s: float) -> None:
        """`talk`: says what is said at once, and gives what is to trickle, a byte each `every_s`, again and again."""
        self._talk, self._every_s = talk, every_s
        self._over = threading.Event()
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            for byte in self._talk(connection):
                if self._over.wait(self._every_s):
                    return
                connection.sendall(bytes([byte]))

    def close(self) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)


@contextlib.contextmanager
def trickling(talk: Talk, every_s: float = 0.02) -> Iterator[Trickle]:
    """Such a server, until the end of the `with`."""
    made = Trickle(talk, every_s)
    try:
        yield made
    finally:
        made.close()
