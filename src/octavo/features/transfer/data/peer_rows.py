"""Rows of host memory that other engines read themselves, by NIXL (TIR-32): pointing at them, and reading them.

Promises: what was read counts only when the peer says afterwards that the row's turn is the one it pointed at, and a turn
changes before the first byte of its row does: so a reader that was late, or a row that was taken meanwhile, makes a
miss, and nothing that reads here holds memory back. There is no lease, since none would promise more.
Does not know: why a row is read, or what is in it.
"""

import logging
import socket
import threading
from collections.abc import Sequence
from typing import Any

from octavo.base.errors import ConfigError
from octavo.features.transfer.address import TierAddress
from octavo.features.transfer.data import one_sided
from octavo.features.transfer.data.api import Bytes
from octavo.features.transfer.data.ledger import RowLedger
from octavo.features.transfer.data.one_sided import FarMemory, NixlProgress
from octavo.features.transfer.data.regions import HostRegion
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.data.timed import TimedSocket
from octavo.features.transfer.wire import (
    MOST_KEYS,
    FoundKeys,
    Message,
    Point,
    Pointed,
    Stood,
    WireError,
    receive,
    send,
)

log = logging.getLogger(__name__)

NO_ROW = -1
CLOSE_S = 5.0


class RowPointer:
    """The side that is read. NIXL begins, beside everything else, when somebody first asks.

    Owns: the agent and the thread that starts it, the thread that lets it work, and which connections read.
    """

    def __init__(self, rows: RowLedger, host: HostRegion) -> None:
        self._rows = rows
        self._host = host
        self._lock = threading.Lock()
        self._agent: Any = None
        self._metadata = b""
        self._never = ""
        self._starter: threading.Thread | None = None
        self._progress: NixlProgress | None = None
        self._reading: set[socket.socket] = set()

    def answer(self, connection: socket.socket, message: Message) -> bool:
        if isinstance(message, Point) and len(message.keys) <= MOST_KEYS:
            self._point(connection, message.keys)
        elif isinstance(message, Stood) and len(message.rows) <= MOST_KEYS:
            good = tuple(self._rows.stood(row, turn) for row, turn in message.rows)
            self.left(connection)
            send(connection, FoundKeys(good))
        else:
            return False
        return True

    @property
    def reads_by_nixl(self) -> bool:
        """NIXL has begun: who asks is pointed at rows."""
        return self._progress is not None

    def _point(self, connection: socket.socket, keys: Sequence[bytes]) -> None:
        with self._lock:
            if self._starter is None and not self._never:
                if one_sided.is_installed():
                    self._starter = threading.Thread(target=self._start, name="octavo-kv-nixl-start", daemon=True)
                    self._starter.start()
                else:
                    self._never = f"there, {one_sided.missing('that')}"
            if self._progress is None:
                send(connection, Pointed(agent=b"", never=self._never))
                return
            if connection not in self._reading:
                self._reading.add(connection)
                self._progress.add(1)
        start, stride = self._host.extent[0], self._host[0].nbytes
        rows = tuple(self._rows.where(key) or (NO_ROW, 0) for key in keys)
        send(connection, Pointed(agent=self._metadata, start=start, stride=stride, rows=rows))

    def _start(self) -> None:
        try:
            agent = one_sided.open_agent([self._host.extent], "reading host memory")
            metadata = agent.get_agent_metadata()
        except Exception as error:  # the border between those who would read and this engine
            log.warning("other engines read over TCP only: %s", error)
            with self._lock:
                self._never = f"there, {error}"
            return
        with self._lock:
            self._agent, self._metadata = agent, metadata  # its memory stays registered as long as it lives
            self._progress = NixlProgress(agent)

    def left(self, connection: socket.socket) -> None:
        with self._lock:
            if connection in self._reading and self._progress is not None:
                self._reading.remove(connection)
                self._progress.add(-1)

    def close(self) -> None:
        if self._starter is not None:
            self._starter.join(CLOSE_S)
        if self._progress is not None:
            self._progress.stop()


class RowReader:
    """The side that reads.

    Owns: nothing.
    """

    def __init__(self, far: FarMemory, seal: Seal) -> None:
        self._far = far
        self._seal = seal

    def read(
        self, connection: TimedSocket, keys: Sequence[bytes], rows: Sequence[Bytes], good: list[bool]
    ) -> str | None:
        """Fill each row with its key's chunk and note which are good. None: that was done; else why the peer must send
        instead, which is empty when it only has to begin. Raises `OSError` or `ValueError`."""
        for start in range(0, len(keys), MOST_KEYS):
            part = tuple(keys[start : start + MOST_KEYS])
            send(connection, Point(part))
            there = receive(connection, Pointed)
            if not there.agent:
                return there.never
            if len(there.rows) != len(part):
                raise WireError("an answer has another length than its question")
            found = [at for at, (row, _) in enumerate(there.rows) if row != NO_ROW]
            chunks = [((there.start + there.rows[at][0] * there.stride, self._seal.length(part[at])),) for at in found]

            def take(number: int, body: Bytes, found: list[int] = found, start: int = start) -> None:
                rows[start + found[number]][: len(body)] = body

            self._far.read(there.agent, chunks, lambda: connection.deadline.is_ahead, take)
            send(connection, Stood(tuple(there.rows[at] for at in found)))
            stood = receive(connection, FoundKeys).good
            if len(stood) != len(found):
                raise WireError("an answer has another length than its question")
            for at, fine in zip(found, stood, strict=True):
                good[start + at] = fine
        return None


def open_far(address: TierAddress, seal: Seal) -> FarMemory:
    """What reads a peer's rows. Raises `ConfigError` without NIXL, or where it does not work."""
    try:
        return FarMemory(one_sided.open_agent((), f"--kv-tier {address.text}"), seal.most_bytes)
    except ConfigError as error:
        raise ConfigError(f"{error}; or leave out transport=nixl, to read over TCP") from None
