"""Reading another process's memory over NIXL, which needs no GPU and no answer from whoever is read.

Promises: what NIXL may still write to is given to nobody: it writes to landings of its own here, what arrived is copied
from them, and one whose transfer did not end in time is kept until it has; meanwhile nothing else is read there. Giving
a handle back is not enough: over TCP, UCX goes on writing when a frozen peer wakes, long after NIXL said that the
transfer was released (PDX-9).
Does not know: whether what was read is still what was asked for: that is for whoever was read to say, afterwards.

NIXL is a package of its own (the extra `nixl`).
"""

import contextlib
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from octavo.base.errors import ConfigError
from octavo.base.packages import install_command
from octavo.features.transfer.data.api import Bytes
from octavo.features.transfer.wire import WireError

try:
    import nixl._api as nixl
except ImportError:  # an extra
    nixl = None

log = logging.getLogger(__name__)

POLL_S: Final = 0.0002
STOP_S: Final = 2.0
LANDING_BYTES: Final = 16 << 20  # read at once
MOST_SPOILED: Final = 8  # landings of transfers that failed, kept for a while although nothing should write to them
MEMORY: Final = "DRAM"

Chunk = Sequence[tuple[int, int]]
"""What lies there in pieces and is one here: address and bytes of each."""


def is_installed() -> bool:
    """The package is there."""
    return nixl is not None


def missing(option: str) -> str:
    """What is said where it is not."""
    return f"{option} needs the package nixl: {install_command('nixl')}"


def open_agent(extents: Iterable[tuple[int, int]], option: str) -> Any:
    """A NIXL agent whose memory, by address and bytes, others may read.

    Raises `ConfigError`, naming the option that needs it, without the package, or where it does not work.
    """
    if nixl is None:
        raise ConfigError(missing(option))
    for name in ("nixl", "nixl._api"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        strict = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        # Its own thread of progress spins, beside the engine's compute: progress is made here, while somebody reads.
        config = nixl.nixl_agent_config(backends=["UCX"], enable_prog_thread=False, sync_mode=strict)
        agent = nixl.nixl_agent(uuid.uuid4().hex, config)
        if given := sorted(set(extents)):
            agent.register_memory([(address, size, 0, "") for address, size in given], MEMORY)
    except Exception as error:  # its own errors have no common type
        raise ConfigError(f"{option}: NIXL does not start here: {error}") from None
    return agent


class NixlProgress:
    """A thread that lets NIXL work while somebody reads from here.

    Owns: the thread, and how many read.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._readers = 0
        self._busy = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="octavo-kv-nixl", daemon=True)
        self._thread.start()

    def add(self, readers: int) -> None:
        """So many more read, or less."""
        with self._lock:
            self._readers += readers
            (self._busy.set if self._readers or self._over else self._busy.clear)()

    def _run(self) -> None:
        while self._busy.wait() and not self._over:
            self._agent.get_new_notifs()
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Nobody reads any more."""
        self._over = True
        self._busy.set()
        self._thread.join(STOP_S)


class FarMemory:
    """What reads there. Threads may share it.

    Owns: the agent, the names of others' agents by what they said of themselves, and the landings: those that are free,
    those that something may still write to (by the name of who is read), and some that were spoiled.
    """

    def __init__(self, agent: Any, most_bytes: int) -> None:
        """`most_bytes`: of one chunk."""
        self._agent = agent
        self._bytes = max(LANDING_BYTES, most_bytes)
        self._lock = threading.Lock()
        self._names: dict[bytes, str] = {}
        self._free: list[Bytes] = []
        self._adrift: list[tuple[str, Any, Bytes]] = []
        self._spoiled: deque[Bytes] = deque(maxlen=MOST_SPOILED)

    def read(
        self, agent: bytes, chunks: Sequence[Chunk], has_time: Callable[[], bool], take: Callable[[int, Bytes], None]
    ) -> None:
        """Read what lies there, as long as there is time, and `take` each chunk by its number as it arrives.

        Raises `WireError`; what was taken before counts.
        """
        name = self._meet(agent)
        for numbers in self._batches(chunks):
            parts = [part for number in numbers for part in chunks[number]]
            landing = self._transfer(name, parts, has_time)
            at = 0
            for number in numbers:
                size = sum(size for _, size in chunks[number])
                take(number, landing[at : at + size])
                at += size
            with self._lock:
                self._free.append(landing)

    def _batches(self, chunks: Sequence[Chunk]) -> Iterator[list[int]]:
        """Numbers of chunks that fit a landing together."""
        batch: list[int] = []
        room = self._bytes
        for number, chunk in enumerate(chunks):
            size = sum(size for _, size in chunk)
            if size > self._bytes:
                raise WireError(f"a chunk of {size} bytes cannot be one of ours")
            if size > room:
                yield batch
                batch, room = [], self._bytes
            batch.append(number)
            room -= size
        if batch:
            yield batch

    def _transfer(self, name: str, parts: list[tuple[int, int]], has_time: Callable[[], bool]) -> Bytes:
        """The landing that holds these parts, one after the other."""
        landing = self._landing()
        mine, at = [], landing.ctypes.data
        for _, size in parts:
            mine.append((at, size, 0))
            at += size
        handle, state, problem = None, "ERR", "NIXL failed to read"
        try:
            local = self._agent.get_xfer_descs(mine, MEMORY)
            remote = self._agent.get_xfer_descs([(address, size, 0) for address, size in parts], MEMORY)
            handle = self._agent.initialize_xfer("READ", local, remote, name)
            state = self._agent.transfer(handle)
            while state == "PROC" and has_time():
                time.sleep(POLL_S)
                state = self._agent.check_xfer_state(handle)
        except Exception as error:  # its own errors have no common type
            state, problem = "ERR", f"NIXL cannot read there: {error}"
        if state == "PROC":
            problem = "NIXL did not read everything in time"
        ended = state != "PROC" and (handle is None or self._release(handle))
        if ended and state == "DONE":
            return landing
        with self._lock:
            if not ended:
                self._adrift.append((name, handle, landing))
            else:
                self._spoiled.append(landing)
                self._forget(name)
        raise WireError(problem)

    def _landing(self) -> Bytes:
        with self._lock:
            if self._free:
                return self._free.pop()
        landing = np.empty(self._bytes, dtype=np.uint8)
        try:
            self._agent.register_memory([(landing.ctypes.data, landing.nbytes, 0, "")], MEMORY)
        except Exception as error:  # as above
            raise WireError(f"NIXL takes no memory: {error}") from None
        return landing

    def _meet(self, agent: bytes) -> str:
        """The name of who said this of itself. Raises `WireError` while a read there has not ended."""
        with self._lock:
            self._look()
            name = self._names.get(agent)
            if name is None:
                try:
                    name = self._names[agent] = self._agent.add_remote_agent(agent)
                except Exception as error:  # as above
                    raise WireError(f"NIXL cannot read there: {error}") from None
            if any(each == name for each, _, _ in self._adrift):
                raise WireError("NIXL has not ended an earlier read there")
            return name

    def _look(self) -> None:
        """What has ended since is no longer adrift."""
        for each in list(self._adrift):
            name, handle, landing = each
            try:
                state = self._agent.check_xfer_state(handle)
            except Exception:  # as above: who was read is gone
                state = "ERR"
            if state == "PROC" or not self._release(handle):
                continue
            self._adrift.remove(each)
            if state == "DONE":
                self._free.append(landing)
            else:
                self._spoiled.append(landing)
                self._forget(name)

    def _release(self, handle: Any) -> bool:
        """Give the transfer's handle back; as long as that fails, something may still write to its landing."""
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:  # as above
            log.warning("a transfer of NIXL cannot be ended yet, and its memory is kept: %s", error)
            return False
        return True

    def _forget(self, name: str) -> None:
        """The other side is made known anew next time."""
        self._names = {said: each for said, each in self._names.items() if each != name}
        with contextlib.suppress(Exception):  # it may be gone already
            self._agent.remove_remote_agent(name)
