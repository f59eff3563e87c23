"""What is written where, what is done when, and what follows: the manager of the tiers (TIR-10 .. TIR-22).

Promises: nothing here blocks; a row that a job reads or writes is never given to anybody else; what one tier may hold
of the primary is bounded, and a job that takes too long is given up, so that nothing is parked or waited for without end,
whatever a tier does; a report that comes twice, late or for nobody changes nothing.
Does not know: bytes, KV blocks, files or sockets; jobs are carried out elsewhere (`features.transfer.plan`).

Order of calls for one request: `open` -> `lookup`... -> `begin_load` / `end_load` -> `begin_store` / `end_store`... ->
`close`. `take_jobs` ends every step; `absorb` takes each job's report.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from octavo.features.transfer.control.askers import Asker, Askers
from octavo.features.transfer.control.evict import Key
from octavo.features.transfer.control.host_index import Chunk, HostBlockIndex
from octavo.features.transfer.control.jobs import TransferJob, TransferJobs
from octavo.features.transfer.control.search import PrefixLookup, Search
from octavo.features.transfer.control.tier_state import TierFacts, TierState
from octavo.features.transfer.plan import JobReport, TierJob, TierJobKind

T = TypeVar("T")

HOST: Final = "host"
PORTION: Final = 256  # keys of one job
PORTION_BYTES: Final = 32 << 20  # and bytes: so much is heard of at once


class TierStack:
    """The primary and the tiers behind it.

    Owns: the primary's books, what every request has learnt, jobs that were given out, and what waits to be.
    """

    def __init__(
        self,
        primary: HostBlockIndex,
        tiers: Sequence[TierFacts],
        *,
        clock: Callable[[], float],
        patience_s: float = 2.0,
        chunk_bytes: int = 0,
    ) -> None:
        """`chunk_bytes`: of the largest chunk; 0: what a chunk costs is not looked at.

        At most half of the primary is held by tiers that write to it, and at most half by those that read from it.
        """
        self.primary = primary
        written = sum(facts.is_written for facts in tiers)
        share = max(1, primary.num_rows // (2 * max(1, len(tiers), written)))
        self._tiers = [TierState(facts, share) for facts in tiers]
        self._clock = clock
        self._patience_s = patience_s
        self._chunk_bytes = chunk_bytes
        self._portion = max(1, min(PORTION, PORTION_BYTES // max(1, chunk_bytes)))
        self._askers = Askers()
        self._jobs = TransferJobs()
        self._search = Search(primary, self._tiers, patience_s, chunk_bytes)
        self.version = 0  # grows when a lookup may give another answer than before, but for patience
        self._host_hits = self._no_room = self._ignored_reports = 0
        self._filled_by_reads = self._filled_by_stores = 0

    # ---- requests -----------------------------------------------------------------------------

    def open(self, request_id: str, *, wants_all: bool = False, only: Sequence[str] | None = None) -> None:
        """A request may ask now. `wants_all`: every chunk of it goes to the tiers, also those that the primary had
        (TIR-13). `only`: names, media or localities of the tiers that are asked for it and given its chunks; None: all."""
        allowed = [n for n, tier in enumerate(self._tiers) if only is None or tier.facts.names.intersection(only)]
        written = tuple(number for number in allowed if self._tiers[number].facts.is_written)
        whole = tuple(number for number in written if wants_all or self._tiers[number].facts.wants_all)
        self._askers.open(request_id, Asker(sum(1 << number for number in allowed), written, whole))

    def wants_all(self, request_id: str) -> bool:
        """Some tier is given every chunk of the request."""
        return bool(self._askers[request_id].whole)

    @property
    def names(self) -> frozenset[str]:
        """What a request may call its tiers by."""
        return frozenset({HOST}).union(*(tier.facts.names for tier in self._tiers))

    @property
    def num_known(self) -> int:
        """Requests that something is known of."""
        return len(self._askers)

    def close(self, request_id: str) -> None:
        """The request has ended. What is known of it goes once nothing of it is under way (TIR-14)."""
        self._askers.close(request_id)

    # ---- device <- primary <- tiers -------------------------------------------------------------

    def lookup(self, request_id: str, keys: Sequence[Key], compute_s: float = 0.0) -> PrefixLookup:
        """What is known of a prefix's chunks. Asks tiers and starts promotions where that helps (TIR-10).

        `compute_s`: how long it takes to compute what one chunk holds; a tier that takes longer is not asked (TIR-33).
        0: it is not known.
        """
        now = self._clock()
        self._give_up(now)
        return self._search.lookup(request_id, self._askers[request_id], keys, compute_s, now)

    def sources(self, request_id: str, keys: Sequence[Key]) -> tuple[str, ...]:
        """Where each of these chunks was when the request asked: the medium of the tier that it was promoted from for
        it, or "host" (TIR-18)."""
        found, media = self._askers[request_id].sources, [tier.facts.medium for tier in self._tiers]
        return tuple([media[found[key]] if key in found else HOST for key in keys])

    def begin_load(self, keys: Sequence[Key]) -> tuple[Chunk, ...]:
        """Chunks that `lookup` called ready in this step, pinned."""
        self._host_hits += len(keys)
        return tuple(self.primary.use(keys))

    def end_load(self, chunks: Sequence[Chunk]) -> None:
        """The copies are made, or were given up."""
        for chunk in chunks:
            self.primary.unpin(chunk)

    # ---- device -> primary -> tiers -------------------------------------------------------------

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
        chunks = self.primary.fill(missing, keep=keys)
        self._no_room += len(missing) - len(chunks)
        asker.stores += len(chunks)
        return tuple(chunks)

    def end_store(self, request_id: str, chunk: Chunk, good: bool) -> None:
        """The copy is made, or failed. A good one goes to every tier, pinned until each has answered (TIR-12)."""
        self.version += 1
        asker = self._askers[request_id]
        self._search.came(chunk.key, self._askers, self._clock())
        if good:
            self.primary.filled(chunk)
            self._filled_by_stores += 1
            if not chunk.detached:
                self._cascade(chunk, asker.written)
        else:
            self.primary.failed(chunk)
        asker.stores -= 1
        self._askers.forget_ended(request_id)

    def _cascade(self, chunk: Chunk, numbers: Sequence[int]) -> None:
        """Reading for a tier is no use of the chunk: it stays as old as it is (TIR-15)."""
        now = self._clock()
        for number in numbers:
            tier = self._tiers[number]
            if tier.admits(now):
                self.primary.pin(chunk)
                tier.num_pinned += 1
                tier.to_write.append(chunk)

    # ---- jobs ---------------------------------------------------------------------------------

    def take_jobs(self) -> tuple[TierJob, ...]:
        """What the tiers are to do, in portions of one kind, tier and, for promotions, request; ends the step."""
        now = self._clock()
        self._give_up(now)
        self._askers.unpark(self._ends)
        if self._search.end_step():
            self.version += 1
        jobs: list[TierJob] = []
        for number, tier in enumerate(self._tiers):
            if not tier.has_more:
                continue
            for chunks in tier.to_read.values():
                jobs += [self._job(number, TierJobKind.READ, part, now) for part in _portions(chunks, self._portion)]
            for keys in _portions(tier.to_find, PORTION):
                tier.lookups += len(keys)
                jobs.append(self._job(number, TierJobKind.FIND, (), now, keys))
            jobs += [
                self._job(number, TierJobKind.WRITE, part, now) for part in _portions(tier.to_write, self._portion)
            ]
            tier.to_read, tier.to_find, tier.to_write = {}, [], []
        return tuple(jobs)

    def _ends(self, asker: Asker, key: Key) -> bool:
        """A parked key ends as soon as its chunk is there or will not come (TIR-13)."""
        chunk = self.primary.get(key)
        if chunk is not None and chunk.ready:
            self._cascade(chunk, asker.whole)
        return chunk is None or chunk.ready

    def _job(
        self, number: int, kind: TierJobKind, chunks: Sequence[Chunk], now: float, keys: Sequence[Key] = ()
    ) -> TierJob:
        tier = self._tiers[number]
        tier.jobs[kind].active += 1
        limit_s = self._patience_s if kind is TierJobKind.FIND else tier.facts.limit_s
        named = tuple(keys) or tuple([chunk.key for chunk in chunks])
        return self._jobs.give(TransferJob(number, kind, named, tuple(chunks), now, limit_s))

    def _give_up(self, now: float) -> None:
        """Jobs that took too long are waited for no more (TIR-13, TIR-17). Rows that they may still write to, or read
        from, stay theirs until they report."""
        for job in self._jobs.expire(now):
            self.version += 1
            tier = self._tiers[job.tier]
            tier.jobs[job.kind].active -= 1
            tier.overdue += 1
            tier.late += 1
            tier.standing(job.kind).bad(now, silent=True)
            if job.kind is TierJobKind.FIND:
                self._search.answered(job.tier, job.keys, (False,) * len(job.keys), self._askers, now)
            elif job.kind is TierJobKind.READ:
                tier.failed_reads += len(job.chunks)
                for chunk in job.chunks:
                    self.primary.abandon(chunk)
                    self._search.lost(chunk.key, job.tier, self._askers)
            else:
                tier.pressure.measured(self._chunk_bytes * len(job.chunks), now - job.given)

    def absorb(self, report: JobReport) -> None:
        """How a job ended. One that came before, or of a job that nobody gave out, is counted and ignored."""
        now = self._clock()
        job = self._jobs.end(report.job, now)
        if job is None:
            self._ignored_reports += 1
            return
        tier = self._tiers[job.tier]
        good = report.good if len(report.good) == len(job.keys) else (False,) * len(job.keys)
        if job.overdue:
            tier.overdue -= 1
        else:
            tier.jobs[job.kind].active -= 1
        tier.did(job.kind, now, good, report)
        if job.kind is TierJobKind.FIND:
            self._found(job, tier, good, now)
        elif job.kind is TierJobKind.READ:
            self._read(job, tier, good, report, now)
        else:
            self._written(job, tier, good, report)

    def _found(self, job: TransferJob, tier: TierState, good: Sequence[bool], now: float) -> None:
        if not job.overdue:
            self.version += 1
            tier.hits += sum(good)
            self._search.answered(job.tier, job.keys, good, self._askers, now)

    def _read(self, job: TransferJob, tier: TierState, good: Sequence[bool], report: JobReport, now: float) -> None:
        self.version += 1
        tier.bytes_read += report.num_bytes
        tier.read_s += report.seconds
        tier.read_speed.seen(report.num_bytes, report.seconds)
        tier.num_reading -= len(job.chunks)
        for chunk, fine in zip(job.chunks, good, strict=True):
            if job.overdue:
                self.primary.failed(chunk)  # nobody waits for it any more
            elif fine:
                self.primary.filled(chunk)
                self._filled_by_reads += 1
                self._search.came(chunk.key, self._askers, now)
            else:
                self.primary.failed(chunk)
                tier.failed_reads += 1
                self._search.lost(chunk.key, job.tier, self._askers)

    def _written(self, job: TransferJob, tier: TierState, good: Sequence[bool], report: JobReport) -> None:
        tier.bytes_written += report.num_bytes
        tier.write_s += report.seconds
        tier.failed_writes += sum(not fine for fine in good)
        tier.pressure.measured(max(report.num_bytes, self._chunk_bytes * len(job.chunks)), report.seconds)
        tier.num_pinned -= len(job.chunks)
        for chunk in job.chunks:
            self.primary.unpin(chunk)

    # ---- the whole ----------------------------------------------------------------------------

    @property
    def has_pending_work(self) -> bool:
        """Jobs are waited for or wait to be given out, or something is parked: the step loop must go on ticking."""
        return bool(self._jobs.num_fresh or self._askers.busy or any(tier.has_more for tier in self._tiers))

    def reset(self) -> bool:
        """Forget what the primary holds; rows in use become free when they no longer are. Tiers keep what they have:
        False when there are any, since a later request may find it (TIR-20)."""
        self.version += 1
        for number, tier in enumerate(self._tiers):
            tier.pressure.reset()
            for chunk in [chunk for chunks in tier.to_read.values() for chunk in chunks]:
                tier.num_reading -= 1  # nobody has begun to
                self.primary.failed(chunk)
                self._search.lost(chunk.key, number, self._askers)
            tier.to_read.clear()
        self.primary.clear()
        self._askers.drop_parked()
        return not self._tiers

    def shutdown(self) -> dict[str, int]:
        """No job is given out any more, and nobody is waited for. How many chunks each tier, by name, was still to be
        given or was at: they are lost to it, or may be."""
        lost = {tier.facts.name: tier.num_pinned for tier in self._tiers if tier.num_pinned}
        for tier in self._tiers:
            for chunk in tier.to_write:
                tier.num_pinned -= 1
                self.primary.unpin(chunk)
            tier.to_write = []
        self.reset()
        return lost

    def stats(self) -> dict[str, float]:
        """Figures for metrics, flat: "host.*", and "<tier>.*" for each tier (TIR-22)."""
        out: dict[str, float] = {
            "host.rows": self.primary.num_rows,
            "host.rows_used": self.primary.num_rows - self.primary.num_free,
            "host.rows_detached": self.primary.num_detached,
            "host.lookups": self._search.num_lookups,
            "host.hits": self._host_hits,
            "host.evicted": self.primary.num_evicted,
            "host.no_room": self._no_room + self._search.no_room,
            "host.filled_by_reads": self._filled_by_reads,
            "host.filled_by_stores": self._filled_by_stores,
            "ignored_reports": self._ignored_reports,
        }
        for tier in self._tiers:
            out.update({f"{tier.facts.name}.{metric}": value for metric, value in tier.metrics().items()})
        return out

    def check(self) -> None:
        """Raise `RuntimeError` when pins, rows and jobs do not add up. For tests and debug mode."""
        self.primary.check()
        self._askers.check()
        pins: dict[int, int] = {}
        holds = [len(tier.to_write) for tier in self._tiers]
        reads = [sum(map(len, tier.to_read.values())) for tier in self._tiers]
        for job in self._jobs:
            for chunk in job.chunks:
                if job.kind is TierJobKind.WRITE:
                    pins[id(chunk)] = pins.get(id(chunk), 0) + 1
                elif chunk.ready:
                    raise RuntimeError("a chunk is findable while a tier still writes to its row")
            (holds if job.kind is TierJobKind.WRITE else reads)[job.tier] += len(job.chunks)
        for job in self._jobs:
            if any(chunk.pins < pins.get(id(chunk), 0) for chunk in job.chunks):
                raise RuntimeError("a chunk lost a pin that a job still needs")
        for tier, num_pinned, num_reading in zip(self._tiers, holds, reads, strict=True):
            if (tier.num_pinned, tier.num_reading) != (num_pinned, num_reading):
                raise RuntimeError(f"the books of {tier.facts.name} miscount what it holds of the primary")
            if max(num_pinned, num_reading) > tier.most_rows:
                raise RuntimeError(f"{tier.facts.name} holds more of the primary than it may")


def _portions(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
