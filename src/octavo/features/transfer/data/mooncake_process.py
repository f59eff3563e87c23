"""The process that speaks to a Mooncake store for this engine, as the engine sees it (PDX-11).

Promises: whoever asks waits no longer than its deadline, whatever the store does; a process that hangs, fails or dies is
ended, and the next line starts another. What a call that was given up may still write to is never used again.
Does not know: what is kept there.
"""

import json
import mmap
import os
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from octavo.base.interpreter import python_command
from octavo.config.env import environment_with
from octavo.features.transfer.data import mooncake_child
from octavo.features.transfer.data.mooncake_child import CODE, QUESTION, READY
from octavo.features.transfer.data.timed import Deadline, TimedSocket

CHILD: Final = Path(mooncake_child.__file__)
START_S: Final = 30.0  # after which a process that is not ready is ended
LEAST_BUFFER: Final = 64 << 20  # of the store's client, for what is on its way
# Limits of the store's client, without which it waits half a minute; whoever starts the engine may set others.
LIMITS: Final = {
    "MC_RPC_TIMEOUT_MS": "1000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
}


class MooncakeProcess:
    """One process. Owns: it, the control socket, and whether it is ready."""

    def __init__(self, settings: Mapping[str, object], command: list[str]) -> None:
        self.settled = threading.Event()  # ready, or why not
        self.why_not = ""
        self.began = time.monotonic()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # its client writes lines about everything it does
                pass_fds=[theirs.fileno()],
                env=environment_with(LIMITS),
            )
        threading.Thread(target=self._listen, name="octavo-kv-mooncake-start", daemon=True).start()

    def _listen(self) -> None:
        try:
            said = self._control.recv(1024)
        except OSError:
            said = b""
        if said != READY:
            self.why_not = said.decode(errors="replace") or "its process ended before it was ready"
        self.settled.set()

    def send(self, line: socket.socket, memory: int) -> None:
        """A new line is served, with this memory. Raises `OSError`."""
        socket.send_fds(self._control, [b"l"], [line.fileno(), memory])

    def end(self) -> None:
        """Nothing that is kept there needs it."""
        self._process.kill()
        self._process.wait()
        self._control.close()


class Line:
    """One thread's way to the store.

    Owns: the socket, and memory in which values are handed over.
    """

    def __init__(self, process: MooncakeProcess, room: int, deadline: Deadline) -> None:
        """Raises `OSError`."""
        self.process = process
        file = os.memfd_create("octavo-kv-mooncake")
        try:
            os.ftruncate(file, room)
            self.memory = memoryview(mmap.mmap(file, room))
            ours, theirs = socket.socketpair()
            self._socket = TimedSocket.of(ours, deadline)
            with theirs:
                process.send(theirs, file)
        finally:
            os.close(file)

    def ask(self, kind: bytes, names: list[str], size: int = 0) -> list[int]:
        """What the store says of each name. Raises `OSError`."""
        text = "\n".join(names).encode()
        self._socket.sendall(QUESTION.pack(kind, len(text), size) + text)
        answer = bytearray()
        while len(answer) < CODE.size * len(names):
            part = self._socket.recv(CODE.size * len(names) - len(answer))
            if not part:
                raise ConnectionError("the process that speaks to the store has ended")
            answer += part
        return [code for (code,) in CODE.iter_unpack(answer)]

    def close(self) -> None:
        """Hang up. The memory stays as long as somebody looks at it."""
        self._socket.close()


class Mooncake:
    """One store, shared by the threads that ask it.

    Owns: the process, of which there is one at a time, and how many use it.
    """

    def __init__(self, master: str, room: int, command: list[str] | None = None) -> None:
        """`room`: bytes of the largest value. `command`: stands for the process in tests."""
        self.room = room
        self._settings = {"master": master, "room": room, "buffer": max(LEAST_BUFFER, 16 * room)}
        self._command = command or python_command(str(CHILD))
        self._lock = threading.Lock()
        self._process: MooncakeProcess | None = None
        self._users = 0

    def join(self) -> None:
        """Somebody more uses it, until `leave`. The first has the process start."""
        with self._lock:
            self._users += 1
            self._current()

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            process = self._process
            if self._users or process is None:
                return
            self._process = None
        process.end()

    def line(self, deadline: Deadline) -> Line:
        """A new line. Raises `OSError`, in time."""
        with self._lock:
            process = self._current()
        if not process.settled.wait(deadline.left()):
            if time.monotonic() - process.began > START_S:
                self.give_up(process)
            raise TimeoutError("its client is not ready yet")
        if process.why_not:
            self.give_up(process)
            raise ConnectionError(process.why_not)
        return Line(process, self.room, deadline)

    def give_up(self, process: MooncakeProcess) -> None:
        """It hangs, or has failed: the next line is another's."""
        with self._lock:
            if self._process is not process:
                return  # another thread has seen to it
            self._process = None
        process.end()

    def _current(self) -> MooncakeProcess:
        if self._process is None:
            self._process = MooncakeProcess(self._settings, self._command)
        return self._process
