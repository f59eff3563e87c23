"""Which key's chunk is in which row of host memory, as far as bytes go: for readers beside the engine's own.

Promises: a copy that `copy_out` gives is of one moment, whole, and of the key that was asked for; so is one that somebody
took between `where` and a `stood` that is true; a row that is being written to is nobody's.
Does not know: pins or eviction: the row's owner may take it at any time, and then a copy fails.

The owner says `begin` before the first byte of a row changes, and `end` when the row holds what it should.
"""

import threading

from octavo.features.transfer.data.api import Bytes
from octavo.features.transfer.data.regions import HostRegion


class RowLedger:
    """Owns: the keys of rows, and how often each row was taken for something new."""

    def __init__(self, host: HostRegion) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._row_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._turn: dict[int, int] = {}

    def begin(self, row: int) -> None:
        """The row is about to be written."""
        with self._lock:
            self._turn[row] = self._turn.get(row, 0) + 1
            key = self._key_of.pop(row, None)
            if key is not None and self._row_of.get(key) == row:
                del self._row_of[key]

    def end(self, row: int, key: bytes) -> None:
        """The row holds the key's chunk."""
        with self._lock:
            self._row_of[key] = row
            self._key_of[row] = key

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return key in self._row_of

    def where(self, key: bytes) -> tuple[int, int] | None:
        """The key's row and its turn, for somebody who reads the row and then asks whether it `stood`."""
        with self._lock:
            row = self._row_of.get(key)
            return None if row is None else (row, self._turn[row])

    def stood(self, row: int, turn: int) -> bool:
        """Since that turn nobody has begun to write to the row: what was read of it until now is whole."""
        with self._lock:
            return self._turn.get(row) == turn

    def copy_out(self, key: bytes, length: int) -> bytearray | None:
        """The first `length` bytes of the key's row; None when it is not there, or was taken meanwhile."""
        with self._lock:
            row = self._row_of.get(key)
            if row is None:
                return None
            turn = self._turn[row]
        room = bytearray(length)
        source: Bytes = self._host[row]
        memoryview(room)[:] = source.data[:length]
        with self._lock:
            return room if self._turn[row] == turn else None
