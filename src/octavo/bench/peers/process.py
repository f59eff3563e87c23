"""A peer's server as a tree of processes: start it, wait until it answers, weigh it, and stop it.

Promises: only processes that were started here are ever signalled, by their ids, each checked to be still the same
process; nothing of a tree is left behind.
Does not know: engines, or what is asked of the server.

Memory is read from Linux's /proc. PSS (proportional set size) counts a page that several processes share once in
all, so its sum over a tree is what the tree really takes; files that are mapped and read count too.
"""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.base.errors import ServerError
from octavo.bench.peers.api import Launch

POLL_S = 0.02
STOP_S = 20.0
KILL_S = 5.0
LOG_TAIL_BYTES = 2000
PROC = Path("/proc")


class PeerFailed(ServerError):
    """A peer's server did not start, or ended while it was needed. The message ends with what its log said last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHandle:
    """One process, told apart from a later one with the same id by when it started (clock ticks after boot)."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentMemory:
    """Resident memory of a tree in bytes. `high_water_bytes` sums each process's own peak since its start (RSS)."""

    pss_bytes: int
    rss_bytes: int
    high_water_bytes: int
    num_processes: int


def process_tree(root: int, proc: Path = PROC) -> tuple[ProcessHandle, ...]:
    """The process `root` and all that descend from it, parents first; empty when `root` is gone."""
    parents: dict[int, int] = {}
    starts: dict[int, int] = {}
    for entry in proc.iterdir():
        if entry.name.isdigit() and (found := _stat(int(entry.name), proc)):
            parents[int(entry.name)], starts[int(entry.name)] = found
    if root not in starts:
        return ()
    tree, level = [root], [root]
    while level:
        level = sorted(pid for pid, parent in parents.items() if parent in level)
        tree += level
    return tuple(ProcessHandle(pid=pid, started=starts[pid]) for pid in tree)


def memory(processes: Iterable[ProcessHandle], proc: Path = PROC) -> ResidentMemory:
    """What these processes hold now; those that have ended count nothing."""
    pss = rss = high = count = 0
    for process in processes:
        rollup = _kib_fields(proc / str(process.pid) / "smaps_rollup")
        status = _kib_fields(proc / str(process.pid) / "status")
        if not rollup:
            continue
        pss, rss, high = pss + rollup.get("Pss", 0), rss + rollup.get("Rss", 0), high + status.get("VmHWM", 0)
        count += 1
    return ResidentMemory(pss_bytes=pss * 1024, rss_bytes=rss * 1024, high_water_bytes=high * 1024, num_processes=count)


def _stat(pid: int, proc: Path) -> tuple[int, int] | None:
    """Parent and start time of a living process, None for others (see proc(5): fields 4 and 22)."""
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name in parentheses may hold anything
    return None if fields[0] == "Z" else (int(fields[1]), int(fields[19]))


def _kib_fields(path: Path) -> dict[str, int]:
    """Lines such as `Pss:  12 kB` of a /proc file; empty when the process is gone."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    split = (line.split() for line in lines)
    return {words[0].rstrip(":"): int(words[1]) for words in split if len(words) == 3 and words[2] == "kB"}


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Server:
    """A started peer.

    Owns: the root process, the log file's handle, and the list of every process seen in its tree.
    """

    def __init__(self, launch: Launch, log: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.launch = launch
        self._log = log
        self._clock = clock
        self._seen: set[ProcessHandle] = set()
        sets = [f"{name}={value}" for name, value in launch.env.items() if value]
        # env(1) sets the variables and becomes the command: same process, and the rest of the environment is ours.
        command = ["env", *sets, *launch.command] if sets else list(launch.command)
        self.started_s = clock()
        with log.open("wb") as output:
            try:
                self._root = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=launch.cwd,
                    start_new_session=True,  # Ctrl-C reaches us alone, and we stop it
                )  # fmt: skip
            except OSError as error:
                raise PeerFailed(f"cannot run {launch.command[0]}: {error.strerror}.") from None

    @property
    def pid(self) -> int:
        """Id of the tree's root."""
        return self._root.pid

    @property
    def base_url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.launch.port}"

    def processes(self) -> tuple[ProcessHandle, ...]:
        """The tree now."""
        tree = process_tree(self.pid)
        self._seen.update(tree)
        return tree

    def memory(self) -> ResidentMemory:
        """What the tree holds now."""
        return memory(self.processes())

    def wait_ready(self, timeout_s: float) -> float:
        """Wait until `GET /health` answers 200; returns the seconds since the command was run."""
        end = self.started_s + timeout_s
        while not self._healthy():
            if self._root.poll() is not None:
                raise PeerFailed(f"it ended with code {self._root.returncode} before it was ready: {self.log_tail()}")
            if self._clock() > end:
                raise PeerFailed(f"it was not ready after {timeout_s:g} s: {self.log_tail()}")
            time.sleep(POLL_S)
        return self._clock() - self.started_s

    def age_s(self) -> float:
        """Seconds since the command was run."""
        return self._clock() - self.started_s

    def check_alive(self) -> None:
        """Raises `PeerFailed` when the root has ended."""
        if self._root.poll() is not None:
            raise PeerFailed(f"it ended with code {self._root.returncode}: {self.log_tail()}")

    def log_tail(self) -> str:
        """The log's last lines in one."""
        text = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", errors="replace")
        return " | ".join(line.strip() for line in text.splitlines()[-6:] if line.strip()) or "its log is empty"

    def stop(self) -> None:
        """Ask the root to end; end by force what is left of the tree."""
        self.processes()
        if self._root.poll() is None:
            self._root.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._root.wait(STOP_S)
        for process in self._seen:
            _kill(process)
        self._root.wait()
        end = self._clock() + KILL_S
        while any(_is_there(process) for process in self._seen) and self._clock() < end:
            time.sleep(POLL_S)  # the next engine is measured on an empty machine

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.launch.port, timeout=5.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _kill(process: ProcessHandle) -> None:
    """SIGKILL, when the id still belongs to the process that was seen."""
    if _is_there(process):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)


def _is_there(process: ProcessHandle) -> bool:
    found = _stat(process.pid, PROC)
    return found is not None and found[1] == process.started


@contextlib.contextmanager
def running(launch: Launch, log: Path) -> Iterator[Server]:
    """A server that is stopped when the block ends, however it ends."""
    server = Server(launch, log)
    try:
        yield server
    finally:
        server.stop()


class MemoryWatch:
    """Samples a server's memory every `interval_s` in a thread, while a `with` block runs.

    Reading PSS of a few GB takes some 10 ms of one core, so once a second is what a measurement can bear.

    Owns: its thread and the samples.
    """

    def __init__(self, server: Server, interval_s: float = 1.0) -> None:
        self._server = server
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
        self.samples: list[ResidentMemory] = []

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.samples.append(self._server.memory())

    @property
    def peak_bytes(self) -> int:
        """Most PSS seen."""
        return max(sample.pss_bytes for sample in self.samples)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.samples.append(self._server.memory())
