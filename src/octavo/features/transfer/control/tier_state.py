"""One secondary tier as its manager knows it: what it is to be asked, how it does, what came of it.

Promises: what one tier may hold of the primary is bounded, whatever it does (`reads_left`, `admits`).
Does not know: requests, or the other tiers (see `tiers`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from octavo.features.transfer.address import DEFAULT_THIN_BELOW, DEFAULT_TIMEOUT_S, LOCAL
from octavo.features.transfer.control.evict import Key
from octavo.features.transfer.control.host_index import Chunk
from octavo.features.transfer.control.pressure import Pressure
from octavo.features.transfer.control.speed import Speed
from octavo.features.transfer.control.standing import Standing
from octavo.features.transfer.plan import JobReport, TierJobKind

LEAST_BYTES: Final = 1 << 16  # of a read that says how fast a tier is
IN_FLIGHT: Final = 1024  # keys that are asked for, and rows that are read into, at a time: so many end in one step


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFacts:
    """One secondary tier, as its manager sees it."""

    name: str
    medium: str = "file"
    locality: str = LOCAL
    is_written: bool = True  # False: what is there is somebody else's
    wants_all: bool = False  # True: all of a request's chunks, not only those that were computed for it (TIR-13)
    high_mark: float = 1 / DEFAULT_THIN_BELOW  # seconds a byte above which stores are thinned
    low_mark: float | None = None  # below which all go again; None: half of the high one
    limit_s: float = DEFAULT_TIMEOUT_S  # how long a read or a write may take
    read_bytes_per_s: float = 0.0  # as measured at the start; 0: it was not

    @property
    def names(self) -> frozenset[str]:
        """What a request may call it by."""
        return frozenset({self.name, self.medium, self.locality})


@dataclass(slots=True)
class JobCount:
    """Jobs of one kind. Owns: how many are under way, and of the others, how many failed as a whole."""

    active: int = 0
    failed: int = 0


@dataclass(slots=True)
class TierState:
    """Owns: what is to be asked of the tier at the end of the step, what it holds, how it does, and its counters."""

    facts: TierFacts
    most_rows: int  # of the primary, to be read into and to be written from, each
    pressure: Pressure = field(init=False)
    read_speed: Speed = field(default_factory=lambda: Speed(LEAST_BYTES))  # bytes a second
    find_health: Standing = field(default_factory=Standing)  # whether it says what it has
    read_health: Standing = field(default_factory=Standing)  # and gives it
    write_health: Standing = field(default_factory=Standing)
    asked: dict[Key, tuple[str, ...]] = field(default_factory=dict)  # who waits; in flight or about to be
    to_find: list[Key] = field(default_factory=list)
    to_read: dict[str, list[Chunk]] = field(default_factory=dict)  # by request
    to_write: list[Chunk] = field(default_factory=list)
    num_reading: int = 0  # rows that it may write to, now or soon
    num_pinned: int = 0  # chunks that wait for it or are being read by it
    jobs: dict[TierJobKind, JobCount] = field(default_factory=lambda: {kind: JobCount() for kind in TierJobKind})
    overdue: int = 0  # jobs that it was given up on and that have not come back
    not_worth: int = 0
    lookups: int = 0
    hits: int = 0
    failed_reads: int = 0
    failed_writes: int = 0
    late: int = 0  # jobs that were given up on, ever
    refused: int = 0  # chunks that were not written since it fails, or holds too much
    bytes_read: int = 0
    bytes_written: int = 0
    read_s: float = 0.0
    write_s: float = 0.0

    def __post_init__(self) -> None:
        self.pressure = Pressure(self.facts.high_mark, self.facts.low_mark)
        self.read_speed.begin(self.facts.read_bytes_per_s)

    @property
    def finds_left(self) -> int:
        """Keys that it may be asked for now."""
        return IN_FLIGHT - len(self.asked)

    @property
    def reads_left(self) -> int:
        """Rows that it may be given to read into now."""
        return min(self.most_rows, IN_FLIGHT) - self.num_reading

    @property
    def has_more(self) -> bool:
        """Something waits for the end of the step."""
        return bool(self.to_find or self.to_read or self.to_write)

    @property
    def trusted(self) -> bool:
        """Worth waiting for: it says what it has and gives it, or is being tried with that."""
        return self.find_health.trusted and (self.read_health.trusted or self.read_health.on_trial)

    def may_ask(self, now: float) -> bool:
        """May it be asked for a key now? Not one that says yes and never gives, but once in a while."""
        return self.read_health.may_try(now) and self.find_health.may_try(now)

    def standing(self, kind: TierJobKind) -> Standing:
        """What jobs of this kind say something of."""
        return {
            TierJobKind.FIND: self.find_health,
            TierJobKind.READ: self.read_health,
            TierJobKind.WRITE: self.write_health,
        }[kind]

    def admits(self, now: float) -> bool:
        """May one more chunk be written to it?"""
        if self.num_pinned >= self.most_rows or not self.write_health.may_try(now):
            self.refused += 1
            return False
        return self.pressure.admits()

    def did(self, kind: TierJobKind, now: float, good: Sequence[bool], report: JobReport) -> None:
        """What a report says of how it does. A failed write counts with the bytes it was to write (TIR-17)."""
        standing = self.standing(kind)
        failed = report.error is not None or (kind is not TierJobKind.FIND and not any(good))
        if failed:
            self.jobs[kind].failed += 1
            standing.bad(now)
        else:
            standing.good()

    def metrics(self) -> dict[str, float]:
        """For metrics (TIR-22)."""
        find, read, write = (self.jobs[kind] for kind in (TierJobKind.FIND, TierJobKind.READ, TierJobKind.WRITE))
        return {
            "lookups": self.lookups,
            "hits": self.hits,
            "finds": find.active,
            "promotions": read.active,
            "cascades": write.active,
            "failed_finds": find.failed,
            "failed_promotions": read.failed,
            "failed_cascades": write.failed,
            "failed_reads": self.failed_reads,
            "failed_writes": self.failed_writes,
            "overdue": self.overdue,
            "late": self.late,
            "pinned": self.num_pinned,
            "dropped": self.pressure.num_dropped,
            "refused": self.refused,
            "not_worth": self.not_worth,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "read_s": self.read_s,
            "write_s": self.write_s,
        }
