"""What the manager of KV tiers costs the scheduler, in its longest step, for prompts of thousands of chunks (TIR-3).

    python benchmarks/kv_tier_manager.py [--chunks 4000] [--rounds 20]

A tier has all of the prompt. Every step looks the prompt up, plans, and takes what the tier has done since the last; jobs
are answered at once and carry nothing, so this is the manager's own time. `promotion` is the longest of all steps until
the prompt is in host memory, `load` the one step that then has it copied to the cache, `pinned` the longest step where
every row of host memory is in use.
"""

import argparse
import statistics
import time
from types import SimpleNamespace

from octavo.base.step import StepTimings
from octavo.features.transfer.control.chunks import ChunkKeys
from octavo.features.transfer.control.evict import make_policy
from octavo.features.transfer.control.host_index import HostBlockIndex
from octavo.features.transfer.control.offload import Offload
from octavo.features.transfer.control.tier_state import TierFacts
from octavo.features.transfer.control.tiers import TierStack
from octavo.features.transfer.plan import JobReport, TransferReport
from octavo.scheduler.seams import Match

SIZE = 16  # tokens of a block


class Desk:
    """The scheduler's place.

    Owns: the part, the request's blocks, and the time of each step.
    """

    def __init__(self, num_rows):
        self.stack = TierStack(
            HostBlockIndex(num_rows, make_policy("lru", num_rows)), [TierFacts(name="disk")], clock=lambda: 0.0
        )
        self.blocks = ()
        self.part = Offload(
            self.stack, chunks=ChunkKeys((SIZE,), SIZE), blocks_of=lambda _: (self.blocks,), clock=lambda: 0.0
        )
        self.steps = []

    def step(self, req, jobs, blocks=None):
        """One step: what was done is taken, the prompt is looked up, and loaded to `blocks` if all is there."""
        report = TransferReport(jobs=tuple(JobReport(job=job.job, good=(True,) * len(job.keys)) for job in jobs))
        result = SimpleNamespace(seq=len(self.steps), timings=StepTimings(), part=lambda _: report)
        builder = SimpleNamespace(takes={}, rows=(), seq=len(self.steps))
        began = time.thread_time()
        self.part.absorb(result)
        found = self.part.match(req, 0)
        if blocks and isinstance(found, Match):
            self.blocks = blocks
            self.part.after_reserve(req, [blocks], found.tokens)
        plan = self.part.plan(builder)
        self.steps.append(time.thread_time() - began)
        return found, () if plan is None else plan.tier_jobs


def prompt(name, chunks):
    """A request of so many chunks."""
    hashes = [b"%032d" % i for i in range(chunks)]
    return SimpleNamespace(
        request_id=name,
        block_hashes=hashes,
        num_tokens=chunks * SIZE + 1,
        source=SimpleNamespace(part={}.get),
    )


def come_back(chunks):
    """Seconds of the longest step of a promotion, of the step that loads, and how many steps there were."""
    desk, req, jobs = Desk(4 * chunks), prompt("a", chunks), ()
    desk.part.on_arrival(req)
    while not isinstance((answer := desk.step(req, jobs))[0], Match):
        jobs = answer[1]
    promotion, count = max(desk.steps), len(desk.steps)
    desk.step(req, (), list(range(1, chunks + 1)))
    return promotion, desk.steps[-1], count


def pinned(chunks):
    """Seconds of the longest step where `chunks` other chunks hold every row."""
    desk, req, jobs = Desk(chunks), prompt("a", chunks // 4), ()
    desk.stack.open("other", only=())
    stored = desk.stack.begin_store("other", [b"s%d" % i for i in range(chunks)])
    for chunk in stored:
        desk.stack.end_store("other", chunk, True)
    desk.stack.begin_load([chunk.key for chunk in stored])
    desk.part.on_arrival(req)
    while not isinstance((answer := desk.step(req, jobs))[0], Match):
        jobs = answer[1]
    return max(desk.steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chunks", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    rounds = [(*come_back(args.chunks), pinned(args.chunks)) for _ in range(args.rounds)]
    promotion, load, count, full = zip(*rounds, strict=True)
    print(
        f"{args.chunks:,} chunks, {args.rounds} rounds, milliseconds of processor time in the longest step: median (least..most)"
    )
    for name, values in (("promotion", promotion), ("load", load), ("pinned", full)):
        ms = sorted(1e3 * value for value in values)
        print(f"{name:10} {statistics.median(ms):6.2f} ({ms[0]:.2f}..{ms[-1]:.2f})")
    print(f"steps of a promotion: {count[0]}")


if __name__ == "__main__":
    main()
