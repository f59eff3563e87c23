"""The manager of the tiers with a clock that is set by hand, and answers given by hand."""

from octavo.features.transfer.control.evict import make_policy
from octavo.features.transfer.control.host_index import HostBlockIndex
from octavo.features.transfer.control.tier_state import TierFacts
from octavo.features.transfer.control.tiers import TierStack
from octavo.features.transfer.plan import JobReport


class Rig:
    """A stack and a clock that is set by hand."""

    def __init__(
        self, rows=8, tiers=("disk",), policy="lru", patience_s=2.0, chunk_bytes=0, greedy=(), remote=(), **facts
    ):
        self.now = 0.0
        self.stack = TierStack(
            HostBlockIndex(rows, make_policy(policy, rows)),
            [
                TierFacts(
                    name=name, wants_all=name in greedy, locality="remote" if name in remote else "local", **facts
                )
                for name in tiers
            ],
            clock=lambda: self.now,
            patience_s=patience_s,
            chunk_bytes=chunk_bytes,
        )

    def store(self, request_id, keys, good=True):
        chunks = self.stack.begin_store(request_id, keys)
        for chunk in chunks:
            self.stack.end_store(request_id, chunk, good)
        return [chunk.key for chunk in chunks]

    def answer(self, *jobs, good=True, seconds=0.0):
        for job in jobs:
            self.stack.absorb(
                JobReport(job=job.job, good=(good,) * len(job.keys), num_bytes=1000 * len(job.rows), seconds=seconds)
            )
            self.stack.check()

    def jobs(self, *kinds):
        jobs = self.stack.take_jobs()
        assert [job.kind for job in jobs] == list(kinds)
        return jobs


def keys(text):
    return tuple(letter.encode() for letter in text)
