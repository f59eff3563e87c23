"""Jobs that tiers were given, and until when each is waited for.

Promises: every job is waited for no longer than its limit since the tier was last heard, and `PATIENT` times that in
all; then it is *overdue*, once, and stays known until it reports, since memory may still be written by it.
Does not know: what follows from a job's end (see `tiers`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Final

from octavo.features.transfer.control.evict import Key
from octavo.features.transfer.control.host_index import Chunk
from octavo.features.transfer.plan import TierJob, TierJobKind

PATIENT: Final = 6  # limits that a job of a tier that goes on reporting others may take


@dataclass(slots=True)
class TransferJob:
    """One job that was given out."""

    tier: int
    kind: TierJobKind
    keys: tuple[Key, ...]
    chunks: tuple[Chunk, ...]
    given: float
    limit_s: float
    overdue: bool = False


class TransferJobs:
    """Owns: jobs that have not reported, when each tier was last heard, and the number of the next job."""

    def __init__(self) -> None:
        self._jobs: dict[int, TransferJob] = {}
        self._heard: dict[tuple[int, bool], float] = {}  # by tier, and whether it is a writing one
        self._next = 0
        self._look_at = inf  # before then, none is overdue
        self.num_fresh = 0  # those that are not overdue

    def __iter__(self) -> Iterator[TransferJob]:
        return iter(self._jobs.values())

    def give(self, job: TransferJob) -> TierJob:
        """The job as it goes to the other half."""
        self._next += 1
        self._jobs[self._next] = job
        self.num_fresh += 1
        self._look_at = min(self._look_at, self._due(job))
        rows = tuple([chunk.row for chunk in job.chunks])
        return TierJob(job=self._next, tier=job.tier, kind=job.kind, keys=job.keys, rows=rows)

    def end(self, number: int, now: float) -> TransferJob | None:
        """It reported. None: there is no such job, or it came before."""
        job = self._jobs.pop(number, None)
        if job is not None:
            self._heard[job.tier, job.kind is TierJobKind.WRITE] = now
            self.num_fresh -= not job.overdue
        return job

    def _due(self, job: TransferJob) -> float:
        heard = self._heard.get((job.tier, job.kind is TierJobKind.WRITE), -inf)
        return min(max(job.given, heard) + job.limit_s, job.given + PATIENT * job.limit_s)

    def expire(self, now: float) -> list[TransferJob]:
        """Those that have become overdue."""
        if now < self._look_at:
            return []
        fresh = [job for job in self._jobs.values() if not job.overdue]
        late = [job for job in fresh if self._due(job) <= now]
        for job in late:
            job.overdue = True
        self.num_fresh -= len(late)
        self._look_at = min((self._due(job) for job in fresh if not job.overdue), default=inf)
        return late
