"""One secondary tier as its manager knows it: what it is to be asked, how fast it is, what came of it.

Promises: nothing but values.
Does not know: requests, or the other tiers (see `tiers`).
"""

from dataclasses import dataclass, field
from typing import Final

from octavo.features.transfer.control.evict import Key
from octavo.features.transfer.control.pressure import Pressure
from octavo.features.transfer.control.primary import Chunk
from octavo.features.transfer.control.speed import Speed

LEAST_BYTES: Final = 1 << 16  # of a read that says how fast a tier is


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFacts:
    """One secondary tier, as its manager sees it."""

    name: str
    medium: str = "file"
    is_written: bool = True  # False: what is there is somebody else's
    wants_all: bool = False  # True: all of a request's chunks, not only those that were computed for it (TIR-13)
    high_mark: float = 50e-9  # seconds a byte above which stores are thinned


@dataclass(slots=True)
class TierBooks:
    """Owns: what is to be asked of the tier at the end of the step, its pressure and its counters."""

    facts: TierFacts
    pressure: Pressure = field(init=False)
    reading: Speed = field(default_factory=lambda: Speed(LEAST_BYTES))  # bytes a second
    asked: dict[Key, float] = field(default_factory=dict)  # since when; in flight or about to be
    to_find: list[Key] = field(default_factory=list)
    to_write: list[Chunk] = field(default_factory=list)
    not_worth: int = 0
    lookups: int = 0
    hits: int = 0
    failed_reads: int = 0
    failed_writes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    read_s: float = 0.0
    write_s: float = 0.0
    jobs: int = 0  # in flight

    def __post_init__(self) -> None:
        self.pressure = Pressure(self.facts.high_mark)

    def figures(self) -> dict[str, float]:
        """For metrics (TIR-22)."""
        return {
            "lookups": self.lookups,
            "hits": self.hits,
            "jobs": self.jobs,
            "failed_reads": self.failed_reads,
            "failed_writes": self.failed_writes,
            "dropped": self.pressure.num_dropped,
            "not_worth": self.not_worth,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "read_s": self.read_s,
            "write_s": self.write_s,
        }
