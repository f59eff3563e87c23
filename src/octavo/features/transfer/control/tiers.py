"""Which chunk is fetched from where, what is written where, and when: the manager of the tiers (TIR-10 .. TIR-22).

Promises: nothing here blocks; a lookup ends in a hit or a miss within `patience_s`, whatever a tier does; a row that
a job reads or writes is never given to anybody else; a report that comes twice, late or for nobody changes nothing.
Does not know: bytes, KV blocks, files or sockets; jobs are carried out elsewhere (`features.transfer.plan`).

Order of calls for one request: `open` -> `lookup`... -> `begin_load` / `end_load` -> `begin_store` / `end_store`... ->
`close`. `take_jobs` ends every step; `absorb` takes each job's report.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from octavo.features.transfer.control.evict import Key
from octavo.features.transfer.control.primary import Chunk, PrimaryTier
from octavo.features.transfer.control.tier_books import TierBooks, TierFacts
from octavo.features.transfer.plan import JobReport, TierJob, TierJobKind

HOST: Final = "host"
TRY_AGAIN: Final = 64  # every so many lookups a tier that is too slow is asked all the same: it may be faster by now


class Found(Enum):
    """What is known of a chunk."""

    HIT = "hit"  # in the primary
    PENDING = "pending"  # on its way there
    RETRY = "retry"  # somebody is being asked
    MISS = "miss"


@dataclass(frozen=True, slots=True)
class Lookup:
    """How many of the leading chunks are in the primary, and what is known of the first that is not.

    `state` is HIT when all are there. Where it is PENDING or RETRY, asking again in a later step gives more.
    """

    num_ready: int
    state: Found


@dataclass(slots=True)
class _Asker:
    """One request. Owns: what it has learnt of tiers."""

    tiers: tuple[int, ...] = ()
    written: tuple[int, ...] = ()  # of those, the ones that what is computed goes to
    whole: tuple[int, ...] = ()  # of those, the ones that all of the request goes to
    absent: set[tuple[int, Key]] = field(default_factory=set)
    present: dict[Key, int] = field(default_factory=dict)
    sources: dict[Key, int] = field(default_factory=dict)  # tier from which a chunk was promoted for it
    since: dict[Key, float] = field(default_factory=dict)  # when a promotion was first waited for
    parked: set[Key] = field(default_factory=set)  # to be written to `whole` once the primary has them
    stores: int = 0  # in flight
    ended: bool = False


@dataclass(slots=True)
class _Job:
    tier: int
    kind: TierJobKind
    keys: tuple[Key, ...]
    chunks: tuple[Chunk, ...] = ()


class TierStack:
    """The primary and the tiers behind it.

    Owns: the primary's books, what every request has learnt, jobs that were given out, and what waits to be.
    """

    def __init__(
        self,
        primary: PrimaryTier,
        tiers: Sequence[TierFacts],
        *,
        clock: Callable[[], float],
        patience_s: float = 2.0,
        chunk_bytes: int = 0,
    ) -> None:
        """`chunk_bytes`: of the largest chunk; 0: what a chunk costs is not looked at."""
        self.primary = primary
        self._tiers = [TierBooks(facts) for facts in tiers]
        self._clock = clock
        self._patience_s = patience_s
        self._chunk_bytes = chunk_bytes
        self._askers: dict[str, _Asker] = {}
        self._to_read: dict[tuple[int, str], list[Chunk]] = {}
        self._waiting: dict[Key, set[str]] = {}  # requests that wait for a promotion
        self._jobs: dict[int, _Job] = {}
        self._next_job = 0
        self.version = 0  # grows when a lookup may give another answer than before, but for patience
        self._host_hits = self._no_room = self._ignored_reports = 0
        self._filled_by_reads = self._filled_by_stores = 0

    # ---- requests -----------------------------------------------------------------------------

    def open(self, request_id: str, *, wants_all: bool = False, only: Sequence[str] | None = None) -> None:
        """A request may ask now. `wants_all`: every chunk of it goes to the tiers, also those that the primary had
        (TIR-13). `only`: names or media of the tiers that are asked for it and given its chunks; None: all."""
        allowed = tuple(
            number
            for number, tier in enumerate(self._tiers)
            if only is None or tier.facts.name in only or tier.facts.medium in only
        )
        written = tuple(number for number in allowed if self._tiers[number].facts.is_written)
        whole = tuple(number for number in written if wants_all or self._tiers[number].facts.wants_all)
        self._askers[request_id] = _Asker(allowed, written, whole)

    def wants_all(self, request_id: str) -> bool:
        """Some tier is given every chunk of the request."""
        return bool(self._askers[request_id].whole)

    @property
    def names(self) -> frozenset[str]:
        """What a request may call its tiers by."""
        facts = [tier.facts for tier in self._tiers]
        return frozenset({HOST, *(f.name for f in facts), *(f.medium for f in facts)})

    def close(self, request_id: str) -> None:
        """The request has ended. What is known of it goes once nothing of it is under way (TIR-14)."""
        asker = self._askers.get(request_id)
        if asker is not None:
            asker.ended = True
            self._forget(request_id, asker)

    def _forget(self, request_id: str, asker: _Asker) -> None:
        if asker.ended and not asker.stores and not asker.parked:
            del self._askers[request_id]

    # ---- what is there ------------------------------------------------------------------------

    def lookup(self, request_id: str, keys: Sequence[Key], compute_s: float = 0.0) -> Lookup:
        """What is known of a prefix's chunks. Asks tiers and starts promotions where that helps (TIR-10).

        `compute_s`: how long it takes to compute what one chunk holds; a tier that takes longer is not asked (TIR-33).
        0: it is not known.
        """
        num_ready, state, now = 0, Found.HIT, self._clock()
        for number in self._askers[request_id].tiers:
            tier = self._tiers[number]
            if self._too_slow(tier, compute_s):
                tier.not_worth += 1
        for key in keys:
            one = self._look(request_id, key, keys, now, compute_s)
            if one is Found.MISS:
                return Lookup(num_ready, one if state is Found.HIT else state)
            if state is Found.HIT:
                if one is Found.HIT:
                    num_ready += 1
                else:
                    state = one
        return Lookup(num_ready, state)

    def _look(self, request_id: str, key: Key, keys: Sequence[Key], now: float, compute_s: float) -> Found:
        asker, chunk = self._askers[request_id], self.primary.get(key)
        if chunk is not None:
            if chunk.ready:
                return Found.HIT
            since = asker.since.setdefault(key, now)
            if now - since > self._patience_s:
                return Found.MISS
            self._waiting.setdefault(key, set()).add(request_id)
            return Found.PENDING
        for number in asker.tiers:
            if (number, key) in asker.absent:
                continue
            if asker.present.get(key) == number:
                return self._promote(request_id, key, number, keys, now)
            tier = self._tiers[number]
            if self._too_slow(tier, compute_s) and tier.not_worth % TRY_AGAIN:
                continue
            if key not in tier.asked:
                tier.asked[key] = now
                tier.to_find.append(key)
            elif now - tier.asked[key] > self._patience_s:
                asker.absent.add((number, key))
                continue
            self._waiting.setdefault(key, set()).add(request_id)
            return Found.RETRY
        return Found.MISS

    def _too_slow(self, tier: TierBooks, compute_s: float) -> bool:
        return compute_s > 0 and tier.reading.seconds(self._chunk_bytes) > compute_s

    def _promote(self, request_id: str, key: Key, number: int, keys: Sequence[Key], now: float) -> Found:
        """The row is taken at once, so that nobody starts the same again (TIR-11), and none from the same prefix."""
        chunks = self.primary.fill((key,), keep=frozenset(keys))
        if not chunks:
            self._no_room += 1
            return Found.MISS
        self._to_read.setdefault((number, request_id), []).append(chunks[0])
        self._waiting.setdefault(key, set()).add(request_id)
        asker = self._askers[request_id]
        asker.sources[key] = number
        asker.since[key] = now
        return Found.PENDING

    # ---- device <- primary --------------------------------------------------------------------

    def source(self, request_id: str, keys: Sequence[Key]) -> str:
        """Where these chunks were when the request asked: the medium of a tier that one was promoted from for it, or
        "host" (TIR-18)."""
        sources = self._askers[request_id].sources
        return next((self._tiers[sources[key]].facts.medium for key in keys if key in sources), HOST)

    def begin_load(self, keys: Sequence[Key]) -> tuple[Chunk, ...]:
        """Chunks that `lookup` called ready in this step, pinned."""
        out = []
        for key in keys:
            chunk = self.primary.get(key)
            if chunk is None or not chunk.ready:
                raise RuntimeError("a chunk was to be loaded that is not there; look it up in the same step")
            self.primary.pin(chunk)
            self.primary.touch(chunk)
            out.append(chunk)
        self._host_hits += len(keys)
        return tuple(out)

    def end_load(self, chunks: Sequence[Chunk]) -> None:
        """The copies are made, or were given up."""
        for chunk in chunks:
            self.primary.unpin(chunk)

    # ---- device -> primary --------------------------------------------------------------------

    def begin_store(self, request_id: str, keys: Sequence[Key]) -> tuple[Chunk, ...]:
        """Rows to copy chunks to: for those of `keys` that are not there yet, as far as there is room.

        What finds no room is not stored: a cache may lose.
        """
        asker, missing = self._askers[request_id], []
        for key in dict.fromkeys(keys):
            chunk = self.primary.get(key)
            if chunk is None:
                missing.append(key)
            elif asker.whole:
                if chunk.ready:
                    self._cascade(chunk, asker.whole)
                else:
                    asker.parked.add(key)
        chunks = self.primary.fill(missing, keep=frozenset(keys))
        self._no_room += len(missing) - len(chunks)
        asker.stores += len(chunks)
        return tuple(chunks)

    def end_store(self, request_id: str, chunk: Chunk, good: bool) -> None:
        """The copy is made, or failed. A good one goes to every tier, pinned until each has answered (TIR-12)."""
        self.version += 1
        asker = self._askers[request_id]
        if good:
            self.primary.filled(chunk)
            self._filled_by_stores += 1
            if not chunk.detached:
                self._cascade(chunk, asker.written)
        else:
            self.primary.failed(chunk)
        self._waiting.pop(chunk.key, None)
        asker.stores -= 1
        self._forget(request_id, asker)

    def _cascade(self, chunk: Chunk, numbers: Sequence[int]) -> None:
        for number in numbers:
            tier = self._tiers[number]
            if tier.pressure.admits():
                self.primary.pin(chunk)
                tier.to_write.append(chunk)

    # ---- jobs ---------------------------------------------------------------------------------

    def take_jobs(self) -> tuple[TierJob, ...]:
        """What the tiers are to do, one batch for each kind, tier and, for promotions, request; ends the step."""
        self._unpark()
        jobs: list[TierJob] = []
        for (number, _), chunks in self._to_read.items():
            jobs.append(self._job(number, TierJobKind.READ, tuple(c.key for c in chunks), tuple(chunks)))
        self._to_read.clear()
        for number, tier in enumerate(self._tiers):
            if tier.to_find:
                tier.lookups += len(tier.to_find)
                jobs.append(self._job(number, TierJobKind.FIND, tuple(tier.to_find), ()))
                tier.to_find = []
            if tier.to_write:
                chunks = tier.to_write
                tier.to_write = []
                jobs.append(self._job(number, TierJobKind.WRITE, tuple(c.key for c in chunks), tuple(chunks)))
        return tuple(jobs)

    def _unpark(self) -> None:
        """A parked key ends as soon as its chunk is there or will not come (TIR-13)."""
        for request_id, asker in tuple(self._askers.items()):
            for key in tuple(asker.parked):
                chunk = self.primary.get(key)
                if chunk is not None and not chunk.ready:
                    continue
                asker.parked.remove(key)
                if chunk is not None:
                    self._cascade(chunk, asker.whole)
            self._forget(request_id, asker)

    def _job(self, number: int, kind: TierJobKind, keys: tuple[Key, ...], chunks: tuple[Chunk, ...]) -> TierJob:
        self._next_job += 1
        self._jobs[self._next_job] = _Job(number, kind, keys, chunks)
        self._tiers[number].jobs += 1
        return TierJob(job=self._next_job, tier=number, kind=kind, keys=keys, rows=tuple(c.row for c in chunks))

    def absorb(self, report: JobReport) -> None:
        """How a job ended. One that came before, or of a job that nobody gave out, is counted and ignored."""
        self.version += 1
        job = self._jobs.pop(report.job, None)
        if job is None:
            self._ignored_reports += 1
            return
        tier = self._tiers[job.tier]
        tier.jobs -= 1
        good = report.good if len(report.good) == len(job.keys) else (False,) * len(job.keys)
        if job.kind is TierJobKind.FIND:
            self._found(job, tier, good)
        elif job.kind is TierJobKind.READ:
            self._read(job, tier, good, report)
        else:
            self._written(job, tier, good, report)

    def _found(self, job: _Job, tier: TierBooks, good: Sequence[bool]) -> None:
        for key, there in zip(job.keys, good, strict=True):
            tier.asked.pop(key, None)
            tier.hits += there
            for asker in self._askers_for(key):
                if there:
                    asker.present.setdefault(key, job.tier)
                else:
                    asker.absent.add((job.tier, key))

    def _read(self, job: _Job, tier: TierBooks, good: Sequence[bool], report: JobReport) -> None:
        tier.bytes_read += report.num_bytes
        tier.read_s += report.seconds
        tier.reading.seen(report.num_bytes, report.seconds)
        for chunk, fine in zip(job.chunks, good, strict=True):
            askers = self._askers_for(chunk.key)
            if fine:
                self.primary.filled(chunk)
                self._filled_by_reads += 1
                continue
            self.primary.failed(chunk)
            tier.failed_reads += 1
            for asker in askers:  # it is computed again, not asked for again (TIR-16)
                asker.present.pop(chunk.key, None)
                asker.sources.pop(chunk.key, None)
                asker.absent.add((job.tier, chunk.key))

    def _written(self, job: _Job, tier: TierBooks, good: Sequence[bool], report: JobReport) -> None:
        tier.bytes_written += report.num_bytes
        tier.write_s += report.seconds
        tier.failed_writes += sum(not fine for fine in good)
        tier.pressure.measured(report.num_bytes, report.seconds)
        for chunk in job.chunks:
            self.primary.unpin(chunk)

    def _askers_for(self, key: Key) -> list[_Asker]:
        """Who waits for this key, and waits no more."""
        names = self._waiting.pop(key, ())
        return [self._askers[name] for name in names if name in self._askers]

    # ---- the whole ----------------------------------------------------------------------------

    @property
    def has_pending_work(self) -> bool:
        """Jobs are given out or wait to be, or something is parked: the step loop must go on ticking."""
        return bool(
            self._jobs
            or self._to_read
            or any(tier.to_find or tier.to_write for tier in self._tiers)
            or any(asker.parked or asker.stores for asker in self._askers.values())
        )

    def reset(self) -> bool:
        """Forget what the primary holds; rows in use become free when they no longer are. Tiers keep what they have:
        False when there are any, since a later request may find it (TIR-20)."""
        self.version += 1
        for tier in self._tiers:
            tier.pressure.reset()
        self.primary.clear()
        for asker in self._askers.values():
            asker.parked.clear()
        for request_id, asker in tuple(self._askers.items()):
            self._forget(request_id, asker)
        return not self._tiers

    def stats(self) -> dict[str, float]:
        """Figures for metrics, flat: "host.*", and "<tier>.*" for each tier (TIR-22)."""
        out: dict[str, float] = {
            "host.rows": self.primary.num_rows,
            "host.rows_used": self.primary.num_rows - self.primary.num_free,
            "host.hits": self._host_hits,
            "host.evicted": self.primary.num_evicted,
            "host.no_room": self._no_room,
            "host.filled_by_reads": self._filled_by_reads,
            "host.filled_by_stores": self._filled_by_stores,
            "ignored_reports": self._ignored_reports,
        }
        for tier in self._tiers:
            out.update({f"{tier.facts.name}.{figure}": value for figure, value in tier.figures().items()})
        return out

    def check(self) -> None:
        """Raise `RuntimeError` when pins, rows and jobs do not add up. For tests and debug mode."""
        self.primary.check()
        pins: dict[int, int] = {}
        for job in self._jobs.values():
            for chunk in job.chunks:
                if job.kind is TierJobKind.WRITE:
                    pins[id(chunk)] = pins.get(id(chunk), 0) + 1
                elif chunk.ready:
                    raise RuntimeError("a chunk is findable while a tier still writes to its row")
        for job in self._jobs.values():
            for chunk in job.chunks:
                if chunk.pins < pins.get(id(chunk), 0):
                    raise RuntimeError("a chunk lost a pin that a job still needs")
        if any(asker.ended and not asker.stores and not asker.parked for asker in self._askers.values()):
            raise RuntimeError("an ended request is still known")
