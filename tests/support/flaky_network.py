"""A network between two processes that can stall, cut and garble what goes through it.

Promises: `Wire` forwards connections to one port; what it does to them is set at any time; nothing outlives `close`.
Does not know: protocols.
"""

import contextlib
import random
import socket
import threading


class Wire:
    """Owns: the listener, one pair of sockets and two threads for each connection."""

    def __init__(self, target: int, seed: int = 0) -> None:
        self.target = target
        self.garble = 0.0  # chance that a piece has a bit flipped
        self.cut = 0.0  # chance that a piece is the last one
        self._random = random.Random(seed)
        self._flows = threading.Event()
        self._flows.set()
        self._closed = False
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def stall(self) -> None:
        """Nothing arrives any more, and nobody is told."""
        self._flows.clear()

    def flow(self) -> None:
        """What was held up arrives."""
        self._flows.set()

    def close(self) -> None:
        self._closed = True
        self._flows.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.target), timeout=5)
                far.settimeout(None)
            except OSError:
                near.close()
                continue
            self._sockets |= {near, far}
            ends = threading.Barrier(2, action=lambda near=near, far=far: self._end(near, far))
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pump, args=(source, sink, ends), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _end(self, *pair: socket.socket) -> None:
        for each in pair:
            self._sockets.discard(each)
            each.close()

    def _pump(self, source: socket.socket, sink: socket.socket, ends: threading.Barrier) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                if self._closed or self._random.random() < self.cut:
                    break
                if self._random.random() < self.garble:
                    changed = bytearray(data)
                    changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
                    data = bytes(changed)
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(threading.BrokenBarrierError):
            ends.wait(30)
