"""One secondary tier and the threads that work for it.

Promises: a lookup waits for no read, a read for no other request's, and neither for what is written; when all that could
do a thing have hung for a while, it fails at once instead of waiting behind them, until one of them comes back.
Does not know: rows, jobs or reports.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from octavo.features.transfer.address import NIXL, TierAddress
from octavo.features.transfer.data.api import Bytes, Tier
from octavo.features.transfer.data.health import TierHealth
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.plan import TierJobKind
from octavo.plugins.registry import load_target

log = logging.getLogger(__name__)

TIERS: Final = {
    "file": "octavo.features.transfer.data.tier_file:make",
    "redis": "octavo.features.transfer.data.tier_redis:make",
    "s3": "octavo.features.transfer.data.tier_s3:make",
    "mooncake": "octavo.features.transfer.data.tier_mooncake:make",
    "peer": "octavo.features.transfer.data.tier_peer:make",
}
CHECKS: Final = {
    "redis": "octavo.features.transfer.data.tier_redis:check",
    "s3": "octavo.features.transfer.data.tier_s3:check",
    "mooncake": "octavo.features.transfer.data.tier_mooncake:check",
}
SHARED: Final = {"mooncake": "octavo.features.transfer.data.tier_mooncake:open_shared"}
FAR: Final = "octavo.features.transfer.data.peer_rows:open_far"
FINDERS: Final = 2
READERS: Final = 4
WRITERS: Final = 1
STUCK_S: Final = (
    5.0  # after which a call is taken for one that may never end, such as to a network's folder that is gone
)

Work = Callable[[Tier], None]


def check(address: TierAddress) -> None:
    """Before a model is loaded. Raises `ConfigError` for a tier that cannot be."""
    if address.kind in CHECKS:
        load_target(CHECKS[address.kind])(address)


class Nothing:
    """A tier that has nothing and keeps nothing: what is asked instead of one that hangs."""

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)

    def read(self, keys: Sequence[bytes], rows: Sequence[Bytes]) -> list[bool]:
        return [False] * len(keys)

    def write(self, keys: Sequence[bytes], rows: Sequence[Bytes]) -> list[bool]:
        return [False] * len(keys)

    def close(self) -> None:
        return None


class Team:
    """Threads that take work from one queue, each with a tier of its own; one is started when there is work for it.

    Owns: the threads and their tiers, the queue, and since when each is at what it does.
    """

    def __init__(self, name: str, tiers: Sequence[Tier], clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._tiers = list(tiers)
        self._clock = clock
        self._jobs: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._waiting = 0  # work that no thread has taken
        self._began: dict[int, float] = {}  # by thread that is at work

    def put(self, work: Work) -> bool:
        """Have it done; False, and it is not, when all threads have been at something for `STUCK_S`."""
        with self._lock:
            idle = len(self._threads) - len(self._began) - self._waiting
            if idle <= 0 and len(self._threads) < len(self._tiers):
                self._start()
            elif len(self._began) == len(self._tiers) and max(self._began.values()) < self._clock() - STUCK_S:
                return False
            self._waiting += 1
        self._jobs.put(work)
        return True

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, args=(len(self._threads),), name=self._name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, number: int) -> None:
        tier = self._tiers[number]
        while (work := self._jobs.get()) is not None:
            with self._lock:
                self._waiting -= 1
                self._began[number] = self._clock()
            work(tier)
            with self._lock:
                del self._began[number]
            del work

    def stop(self) -> None:
        """No work comes after this. What was put is still done."""
        for _ in self._threads:
            self._jobs.put(None)

    def close(self, until: float, name: str) -> None:
        """After `stop`: each tier is closed when its work is done; `time.monotonic() == until` is the latest."""
        for number, tier in enumerate(self._tiers):
            if number < len(self._threads):
                self._threads[number].join(max(0.0, until - time.monotonic()))
                if self._threads[number].is_alive():
                    log.warning("the KV tier %s is still busy and is left as it is", name)
                    continue
            try:
                tier.close()
            except Exception as problem:
                log.warning("the KV tier %s did not close: %s", name, problem)


class TierThreads:
    """A tier is made once for each thread, so that none of its kinds has to care for threads.

    Owns: the teams.
    """

    def __init__(self, address: TierAddress, seal: Seal) -> None:
        """Raises `ConfigError` for a tier that cannot be."""
        make: Callable[..., Tier] = load_target(TIERS[address.kind])
        if address.transport == NIXL:  # takes half a second to begin: once for all threads
            make = partial(make, far=load_target(FAR)(address, seal))
        if address.kind in SHARED:
            make = partial(make, shared=load_target(SHARED[address.kind])(address, seal))
        self._name = address.name
        self._health = TierHealth(f"KV tier {address.name}")
        sizes = {TierJobKind.FIND: FINDERS, TierJobKind.READ: READERS, TierJobKind.WRITE: WRITERS}
        if not address.is_written:
            del sizes[TierJobKind.WRITE]
        self._teams = {
            kind: Team(f"octavo-kv-{address.kind}-{kind}", [make(address, seal, self._health) for _ in range(size)])
            for kind, size in sizes.items()
        }

    def put(self, kind: TierJobKind, work: Work) -> None:
        """Have this done, which must not raise, with a tier; where the tier hangs, at once and with `Nothing`."""
        team = self._teams.get(kind)
        if team is None:
            work(Nothing())
        elif not team.put(work):
            self._health.note("stuck", f"what was asked of it {STUCK_S:g} s ago has not ended; it is taken for empty")
            work(Nothing())

    def failed(self, error: str) -> None:
        """Work on it raised this, which is none of what its kind expects."""
        self._health.note("raised", f"what was asked of it failed: {error}")

    def stop(self) -> None:
        """No work comes after this. What was put is still done."""
        for team in self._teams.values():
            team.stop()

    def close(self, until: float) -> None:
        """After `stop`: the tier is closed when its work is done; `time.monotonic() == until` is the latest."""
        for team in self._teams.values():
            team.close(until, self._name)
