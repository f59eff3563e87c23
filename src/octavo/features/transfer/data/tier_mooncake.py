"""Chunks in a Mooncake store: memory that machines of a cluster give to a common pool (PDX-11, TIR-31).

Promises: a store that is slow, gone, frozen or answers nonsense makes misses, each call as a whole within `TIMEOUT_S` and
what its bytes take at `LEAST_BYTES_PER_S`, and is then left alone for a while; what it gives is used only when its seal
fits.
Does not know: what a chunk holds. How much the store keeps, and what it forgets, is its matter; this engine gives it no
memory.

A chunk is one value under `octavo-<fingerprint>-<key>`.
"""

import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from octavo.base.errors import ConfigError
from octavo.base.interpreter import python_command
from octavo.base.packages import install_command
from octavo.features.transfer.address import TierAddress
from octavo.features.transfer.data.api import Bytes
from octavo.features.transfer.data.health import TierHealth
from octavo.features.transfer.data.mooncake_child import EXISTS, GET, PUT, REMOVE
from octavo.features.transfer.data.mooncake_process import Line, Mooncake
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.data.timed import Deadline, seconds_for
from octavo.ops import spare

T = TypeVar("T")
TIMEOUT_S: Final = 3.0  # more than the store's client takes to say that a machine does not answer
MOST_NAMES: Final = 1000  # in one question
NO_ROOM, WRONG_SIZE, NOT_WELL, ABSENT, EXISTS_ALREADY = -200, -600, -703, -704, -705  # the store's codes
RPC: Final = range(-999, -899)  # codes of a master that does not answer
CHECK_S: Final = 60.0
PACKAGE: Final = "mooncake-transfer-engine-non-cuda"
TRY_IMPORT: Final = "import mooncake.store"


class StoreError(OSError):
    """The store says that it cannot, with this code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} (code {code})")
        self.code = code


class MooncakeTier:
    """One store.

    Owns: a line to it.
    """

    def __init__(self, store: Mooncake, seal: Seal, health: TierHealth) -> None:
        self._store = store
        self._seal = seal
        self._health = health
        self._deadline = Deadline()
        self._line: Line | None = None
        store.join()

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        def ask(line: Line) -> list[bool]:
            good: list[bool] = []
            for start in range(0, len(keys), MOST_NAMES):
                names = [self._name(key) for key in keys[start : start + MOST_NAMES]]
                good += [_sure(code) > 0 for code in line.ask(EXISTS, names)]
            return good

        self._begin()
        return self._try(ask, [False] * len(keys))

    def read(self, keys: Sequence[bytes], rows: Sequence[Bytes]) -> list[bool]:
        self._begin(keys)
        return [self._try(partial(self._get, key=key, row=row), False) for key, row in zip(keys, rows, strict=True)]

    def _get(self, line: Line, key: bytes, row: Bytes) -> bool:
        head, length = self._seal.head_bytes(key), self._seal.length(key)
        (code,) = line.ask(GET, [self._name(key)], self._store.room)
        if code in (ABSENT, NOT_WELL):
            return False
        body = line.memory[head : head + length]
        fits = code != WRONG_SIZE and _sure(code) == head + length
        if fits and self._seal.opens(key, bytes(line.memory[:head]), body):
            row.data[:length] = body
            return True
        self._health.note("odd", "a value under a key of ours is not a chunk of ours, and is removed")
        line.ask(REMOVE, [self._name(key)])
        return False

    def write(self, keys: Sequence[bytes], rows: Sequence[Bytes]) -> list[bool]:
        self._begin(keys)
        return [self._try(partial(self._put, key=key, row=row), False) for key, row in zip(keys, rows, strict=True)]

    def _put(self, line: Line, key: bytes, row: Bytes) -> bool:
        head, length = self._seal.head_bytes(key), self._seal.length(key)
        body = line.memory[head : head + length]
        body[:] = row.data[:length]
        line.memory[:head] = self._seal.head(key, body, spare.crc32)
        (code,) = line.ask(PUT, [self._name(key)], head + length)
        if code == NO_ROOM:  # that it takes nothing does not speak against reading from it
            self._health.note(
                "refuses",
                "the store has no room for blocks: have a machine give it memory (mooncake_client "
                "--global_segment_size), or more of it",
            )
            return False
        return code == EXISTS_ALREADY or _sure(code) == 0

    def close(self) -> None:
        self._drop()
        self._store.leave()

    # ---- the store ----------------------------------------------------------------------------

    def _name(self, key: bytes) -> str:
        return f"octavo-{self._seal.space}-{key.hex()}"

    def _begin(self, keys: Sequence[bytes] = ()) -> None:
        """A call on this tier begins, which moves these keys' chunks."""
        self._deadline.within(TIMEOUT_S + seconds_for(sum(self._seal.length(key) for key in keys)))

    def _try(self, call: Callable[[Line], T], otherwise: T) -> T:
        if self._health.rests:
            return otherwise
        try:
            if self._line is None:
                self._line = self._store.line(self._deadline)
            answer = call(self._line)
        except OSError as error:
            self._health.failed(error)
            self._drop(end=not isinstance(error, StoreError) or error.code in RPC)
            return otherwise
        self._health.worked()
        return answer

    def _drop(self, end: bool = False) -> None:
        """Hang up; `end`: the process behind the line hangs, or its client has lost the master."""
        line, self._line = self._line, None
        if line is not None:
            line.close()
            if end:
                self._store.give_up(line.process)


def _sure(code: int) -> int:
    """The store's answer. Raises `StoreError` for one that says that it failed."""
    if code >= 0:
        return code
    what = "its master does not answer; see whether mooncake_master runs there"
    if code not in RPC:
        what = "a machine of it does not answer; see whether mooncake_client runs on each that gives memory"
    raise StoreError(code, what)


def check(address: TierAddress) -> None:
    """Raises `ConfigError` where the package is not there, or cannot be loaded here."""
    try:
        done = subprocess.run(
            python_command("-c", TRY_IMPORT), capture_output=True, text=True, errors="replace", timeout=CHECK_S
        )
    except subprocess.TimeoutExpired:
        return  # the machine is busy; what is wrong, the log will say
    if not done.returncode:
        return
    said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    if said.startswith("ModuleNotFoundError"):
        raise ConfigError(
            f"--kv-tier {address.text} needs the package {PACKAGE}: {install_command('mooncake', package=PACKAGE)}"
        )
    more = "; install the system's package libibverbs1 (rdma-core)" if "libibverbs" in said else ""
    raise ConfigError(f"--kv-tier {address.text}: the package mooncake cannot be loaded here ({said}){more}")


def open_shared(address: TierAddress, seal: Seal) -> Mooncake:
    """What all threads of one address share."""
    return Mooncake(address.place, seal.most_sealed_bytes)


def make(address: TierAddress, seal: Seal, health: TierHealth, shared: Mooncake | None = None) -> MooncakeTier:
    """The tier of a `mooncake://` address."""
    return MooncakeTier(open_shared(address, seal) if shared is None else shared, seal, health)
