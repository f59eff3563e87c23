"""How fast a tier gives, measured before anybody needs it (TIR-33).

Promises: all tiers are measured side by side, within `PROBE_S`, whatever one of them does; one that is not written to,
does not answer or fails is not measured. What is written has names of its own and is a small part of what a tier may
hold; where a tier can, it is removed, else it is found again at the next start.
Does not know: what the measurement is for.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import Final, Protocol, runtime_checkable

import numpy as np

from octavo.features.transfer.address import TierAddress
from octavo.features.transfer.data.api import Tier
from octavo.features.transfer.data.seal import Seal
from octavo.features.transfer.data.tier_threads import TierThreads
from octavo.features.transfer.plan import TierJobKind

log = logging.getLogger(__name__)

PROBE_S: Final = 2.0
MOST_CHUNKS: Final = 8
MOST_BYTES: Final = 16 << 20
SHARE: Final = 16  # of what a tier may hold, one part in so many
ROUNDS: Final = 2  # of which the best counts


@runtime_checkable
class OnDisk(Protocol):
    """A tier whose chunks the system may keep in memory, where reading says nothing of how fast the tier is."""

    def cool(self, keys: Sequence[bytes]) -> None:
        """Have these come from where they lie when they are read next."""

    def remove(self, keys: Sequence[bytes]) -> None:
        """They are not needed any more."""


class TierProbe:
    """One tier's measurement. The tier's threads do `write` and `read`.

    Owns: rows of its own, since a tier that hangs may write to them at any time, and what was measured.
    """

    def __init__(self, seal: Seal, most_bytes: int) -> None:
        """Reads so many bytes at most; one chunk at least."""
        keys = [hashlib.sha256(b"octavo probe %d" % i).digest() + bytes(4) for i in range(MOST_CHUNKS)]
        length = seal.length(keys[0])
        self._keys = keys[: max(1, most_bytes // length)]
        self._rows = [np.zeros(length, dtype=np.uint8) for _ in self._keys]
        self._bytes = length * len(self._keys)
        self.written, self.done = threading.Event(), threading.Event()
        self.bytes_per_s = 0.0

    def write(self, tier: Tier) -> None:
        """Have something to read there."""
        try:
            if not all(tier.find(self._keys)):
                tier.write(self._keys, self._rows)
        except Exception as problem:  # the border between one tier and the engine's start
            log.debug("a KV tier took no probe: %s", problem)
        self.written.set()

    def read(self, tier: Tier) -> None:
        """Measure."""
        best = 0.0
        try:
            for _ in range(ROUNDS):
                if isinstance(tier, OnDisk):
                    tier.cool(self._keys)
                began = time.perf_counter()
                if not all(tier.read(self._keys, self._rows)):
                    break
                best = max(best, self._bytes / max(time.perf_counter() - began, 1e-9))
            if isinstance(tier, OnDisk):
                tier.remove(self._keys)
        except Exception as problem:  # the same
            log.debug("a KV tier gave no probe: %s", problem)
        self.bytes_per_s = best
        self.done.set()


def measure(addresses: Sequence[TierAddress], tiers: Sequence[TierThreads], seal: Seal) -> dict[str, float]:
    """Bytes a second that each of these tiers gives, by name; those that did not answer in time are left out, and those
    that are too small for a chunk more."""
    probes: dict[str, TierProbe] = {}
    threads: dict[str, TierThreads] = {}
    for address, tier in zip(addresses, tiers, strict=True):
        most = MOST_BYTES if address.size is None else min(MOST_BYTES, address.size // SHARE)
        if address.is_written and most >= seal.most_bytes:
            probes[address.name], threads[address.name] = TierProbe(seal, most), tier
    until = time.monotonic() + PROBE_S
    for name, probe in probes.items():
        threads[name].put(TierJobKind.WRITE, probe.write)
    for name, probe in probes.items():
        if probe.written.wait(max(0.0, until - time.monotonic())):
            threads[name].put(TierJobKind.READ, probe.read)
    for probe in probes.values():
        if probe.written.is_set():
            probe.done.wait(max(0.0, until - time.monotonic()))
    return {name: probe.bytes_per_s for name, probe in probes.items() if probe.done.is_set() and probe.bytes_per_s}
