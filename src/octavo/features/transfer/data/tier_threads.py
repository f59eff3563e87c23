"""One secondary tier and the threads that work for it.

Promises: what is asked of the tier is answered in order, and never waits behind what is written to it, which nobody
waits for.
Does not know: rows, jobs or reports.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

from octavo.features.transfer.address import TierAddress
from octavo.features.transfer.data.api import Tier
from octavo.features.transfer.data.lane import Lane
from octavo.features.transfer.data.seal import Seal
from octavo.plugins.registry import load_target

log = logging.getLogger(__name__)

TIERS: Final = {
    "file": "octavo.features.transfer.data.tier_file:make",
    "redis": "octavo.features.transfer.data.tier_redis:make",
    "s3": "octavo.features.transfer.data.tier_s3:make",
    "peer": "octavo.features.transfer.data.tier_peer:make",
}


class TierThreads:
    """A tier is made twice, once for each thread, so that none of its kinds has to care for threads.

    Owns: both, and their threads.
    """

    def __init__(self, address: TierAddress, seal: Seal) -> None:
        """Raises `ConfigError` for a tier that cannot be."""
        make: Callable[[TierAddress, Seal], Tier] = load_target(TIERS[address.kind])
        self._name = address.name
        self._tiers = [make(address, seal)]
        self._lanes = [Lane(f"octavo-kv-{address.kind}")]
        if address.is_written:
            self._tiers.append(make(address, seal))
            self._lanes.append(Lane(f"octavo-kv-{address.kind}-write"))

    def ask(self, work: Callable[[Tier], None]) -> None:
        """Have this done that finds or reads; it must not raise."""
        self._lanes[0].put(lambda: work(self._tiers[0]))

    def write(self, work: Callable[[Tier], None]) -> None:
        """Have this done that writes; it must not raise."""
        self._lanes[-1].put(lambda: work(self._tiers[-1]))

    def stop(self) -> None:
        """No work comes after this. What was put is still done."""
        for lane in self._lanes:
            lane.stop(0)

    def close(self, until: float) -> None:
        """After `stop`: the tier is closed when its work is done; `time.monotonic() == until` is the latest."""
        for tier, lane in zip(self._tiers, self._lanes, strict=True):
            if not lane.stop(max(0.0, until - time.monotonic())):
                log.warning("the KV tier %s is still busy and is left as it is", self._name)
                continue
            try:
                tier.close()
            except Exception as problem:
                log.warning("the KV tier %s did not close: %s", self._name, problem)
