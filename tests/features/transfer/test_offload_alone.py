"""The control half in a scheduler's place: how often it asks to be called, what it says of where KV came from, and
what it does with reports and blocks that come together."""

from types import SimpleNamespace

import pytest

from octavo.base.step import StepTimings
from octavo.features.transfer.address import DEFAULT_TIMEOUT_S
from octavo.features.transfer.control.chunks import ChunkKeys
from octavo.features.transfer.control.offload import Offload
from octavo.features.transfer.control.polls import MOST_S, POLL_S, Polls
from octavo.features.transfer.plan import JobReport, TierJobKind, TransferPlan, TransferReport
from octavo.scheduler.seams import Match, Retry
from tests.support.tier_rig import Rig

SIZE = 16


class Asking:
    """What the part sees of a request."""

    def __init__(self, name, seed, num_blocks):
        self.request_id = name
        self.block_hashes = [bytes([seed]) * 31 + bytes([i]) for i in range(num_blocks)]
        self.num_tokens = num_blocks * SIZE + 1
        self.source = SimpleNamespace(part={}.get)


class Desk:
    """A part, its clock, and steps that compute nothing."""

    def __init__(self, blocks=1, **rig):
        self.rig = Rig(**rig)
        self.tables = {}
        self.part = Offload(
            self.rig.stack,
            chunks=ChunkKeys((SIZE,), SIZE, blocks),
            blocks_of=self.tables.__getitem__,
            clock=lambda: self.rig.now,
        )
        self.seq = 0

    def plan(self, rows=()):
        self.seq += 1
        return self.part.plan(SimpleNamespace(takes={}, rows=rows, seq=self.seq))

    def absorb(self, *jobs):
        report = TransferReport(jobs=tuple(jobs))
        result = SimpleNamespace(
            seq=self.seq, timings=StepTimings(), part=lambda kind: report if kind is TransferReport and jobs else None
        )
        return self.part.absorb(result)

    def carry_out(self, plan, good=True):
        """Report all that a plan asks for."""
        for job in (*plan.stores, *plan.loads, *plan.tier_jobs):
            self.absorb(JobReport(job=job.job, good=(good,) * len(job.keys)))

    def reserve(self, req, blocks, external_tokens=0):
        """The scheduler gave it blocks, and some of them are the part's to fill."""
        self.tables[req.request_id] = (tuple(blocks),)
        self.part.after_reserve(req, [blocks], external_tokens)

    def store(self, req):
        """All of a request's blocks, which are 1, 2, ..."""
        self.part.on_arrival(req)
        assert self.part.match(req, 0) == Retry()
        self.carry_out(self.plan(), good=False)  # no tier has it
        assert self.part.match(req, 0) == Match()
        self.reserve(req, range(1, len(req.block_hashes) + 1))
        self.part.on_commit(req, 0, req.block_hashes)
        self.carry_out(plan := self.plan(rows=(req,)))
        self.part.on_finish(req)
        return plan


def test_an_idle_engine_with_a_promotion_that_never_reports_is_soon_idle():
    """F33: an empty plan every 2 ms, for ever. The loop sleeps until the deadline, as the engine's does."""
    desk = Desk(rows=8)
    first, second = Asking("a", 1, 2), Asking("b", 1, 2)
    desk.part.on_arrival(first)
    assert desk.part.match(first, 0) == Retry()
    desk.carry_out(desk.plan())
    assert desk.part.match(first, 0) == Retry()
    (read,) = desk.plan().tier_jobs
    assert read.kind is TierJobKind.READ
    desk.part.on_finish(first)
    desk.part.on_arrival(second)  # and somebody waits for the same
    plans, looks, waits = 0, 0, isinstance(desk.part.match(second, 0), Retry)
    assert waits
    while (deadline := desk.part.next_deadline()) is not None:
        assert deadline > desk.rig.now or looks == 0 or not waits, "it is called again and again at one moment"
        desk.rig.now = max(desk.rig.now, deadline)
        waits = waits and isinstance(desk.part.match(second, 0), Retry)
        plans += desk.plan() is not None
        looks += 1
        assert desk.rig.now < 100
    assert not waits and desk.rig.now <= DEFAULT_TIMEOUT_S + 1
    assert plans < 200 and looks < 300  # and not 5,000
    assert desk.part.settled() and desk.plan() is None
    desk.absorb(JobReport(job=read.job, good=(True, True)))  # it comes after all
    desk.rig.stack.check()
    assert desk.rig.stack.primary.num_free == 8


def test_who_waits_for_a_tier_that_is_full_is_not_looked_up_all_the_time():
    """F33: all that the tier may read into is taken by a promotion that hangs; another request waits for its turn."""
    desk = Desk(rows=8)
    first, second = Asking("a", 1, 6), Asking("b", 2, 2)
    for req in (first, second):
        desk.part.on_arrival(req)
        desk.part.match(req, 0)
    desk.carry_out(desk.plan())
    assert isinstance(desk.part.match(first, 0), Retry)
    (read,) = desk.plan().tier_jobs
    assert len(read.rows) == 4
    looks = 0
    while isinstance(desk.part.match(second, 0), Retry):
        desk.part.match(first, 0)
        desk.plan()
        desk.rig.now = max(desk.rig.now, desk.part.next_deadline())
        looks += 1
        assert looks < 300, desk.rig.now
    assert 1.9 < desk.rig.now < 2.6


def test_what_ends_is_heard_of_after_a_tenth_of_its_time():
    polls, now = Polls(), 0.0
    polls.news(now)
    times = []
    while now < 20:
        times.append(polls.next - now)
        now = polls.next
        polls.looked(now)
    assert times[0] == POLL_S and max(times) == pytest.approx(MOST_S)
    assert sum(times[:20]) < 0.1 and len(times) < 150
    polls.news(now)
    assert polls.next - now == pytest.approx(POLL_S)


def test_who_waits_for_a_tier_that_says_nothing_is_called_again_when_that_is_over():
    """Nothing is under way any more when the limit has passed: without a deadline the request would wait for ever."""
    desk = Desk(rows=8)
    req = Asking("a", 1, 2)
    desk.part.on_arrival(req)
    calls = 0
    while isinstance(desk.part.match(req, 0), Retry):
        desk.plan()
        deadline = desk.part.next_deadline()
        assert deadline is not None, "nobody would call again"
        desk.rig.now = max(desk.rig.now, deadline)
        calls += 1
        assert calls < 300
    assert desk.rig.now < 2.5
    desk.plan()
    assert desk.part.next_deadline() is None


def test_of_a_prefix_that_several_brought_each_is_named_for_its_share():
    """TIR-18: two blocks were in host memory, one came from a tier."""
    desk = Desk(rows=8)
    desk.store(Asking("a", 1, 2))
    desk.carry_out(desk.plan())  # the cascade
    longer = Asking("b", 1, 4)
    desk.part.on_arrival(longer)
    assert desk.part.match(longer, 0) == Retry()
    (find,) = desk.plan().tier_jobs
    desk.absorb(JobReport(job=find.job, good=(True, False)))
    assert desk.part.match(longer, 0) == Retry()
    desk.carry_out(desk.plan())
    shares = ((2 * SIZE, "host"), (3 * SIZE, "file"))
    assert desk.part.match(longer, 0) == Match(tokens=3 * SIZE, wait=True, source="file", shares=shares)


def test_a_pin_that_a_result_ends_makes_room_for_the_blocks_that_it_commits():
    """TIR-12: reports are read before blocks are committed, so nothing that is done stands in the way."""
    desk = Desk(rows=1)
    first, second = Asking("a", 1, 1), Asking("b", 2, 1)
    desk.store(first)
    (write,) = desk.plan().tier_jobs
    assert write.kind is TierJobKind.WRITE
    desk.part.on_arrival(second)
    desk.part.match(second, 0)
    desk.carry_out(desk.plan(), good=False)
    assert desk.part.match(second, 0) == Match()
    desk.reserve(second, [5])
    desk.absorb(JobReport(job=write.job, good=(True,)))  # as `ResultApplier.apply` does, first
    desk.part.on_commit(second, 0, second.block_hashes)
    plan = desk.plan(rows=(second,))
    assert isinstance(plan, TransferPlan) and plan.stores[0].blocks == (5,)
    assert desk.rig.stack.stats()["host.no_room"] == 0


def test_chunks_of_several_blocks_are_stored_and_loaded_whole_but_for_what_is_here():
    """TIR-2."""
    desk = Desk(blocks=2, rows=8)
    plan = desk.store(Asking("a", 1, 5))  # the fifth block is half a chunk
    assert [(copy.blocks, len(copy.rows)) for copy in plan.stores] == [((1, 2, 3, 4), 2)]
    assert [key[31] for key in plan.stores[0].keys] == [1, 3]  # named by their last block
    again = Asking("b", 1, 5)
    desk.part.on_arrival(again)
    desk.carry_out(desk.plan())
    assert desk.part.match(again, SIZE) == Match(
        tokens=4 * SIZE, wait=True, source="host", shares=((4 * SIZE, "host"),)
    )
    desk.reserve(again, [11, 12, 13, 14], 4 * SIZE)
    (load,) = desk.plan().loads
    assert load.blocks == (0, 12, 13, 14) and len(load.rows) == 2  # block 11 is found here, and others read it


# ---- figures (TIR-22) -----------------------------------------------------------------------------------


def test_every_figure_of_a_tier_and_of_the_host():
    desk = Desk(rows=8)
    stack = desk.rig.stack

    def figures(*names):
        return tuple(stack.stats()[name] for name in names)

    desk.store(Asking("a", 1, 2))
    assert figures("host.filled_by_stores", "host.rows_used", "host.rows", "disk.pinned") == (2, 2, 8, 2)
    (write,) = desk.plan().tier_jobs
    assert figures("disk.cascades", "disk.promotions", "disk.finds") == (1, 0, 0)
    desk.absorb(JobReport(job=write.job, good=(True, False), num_bytes=100, seconds=0.5))
    assert figures("disk.cascades", "disk.pinned", "disk.failed_writes", "disk.failed_cascades") == (0, 0, 1, 0)
    assert figures("disk.bytes_written", "disk.write_s") == (100, 0.5)
    longer = Asking("b", 1, 5)
    desk.part.on_arrival(longer)
    desk.part.match(longer, 0)
    (find,) = desk.plan().tier_jobs
    assert figures("host.lookups", "disk.lookups", "disk.finds", "disk.promotions") == (7, 5, 1, 0)
    desk.absorb(JobReport(job=find.job, good=(True, True, False)))
    desk.part.match(longer, 0)
    (read,) = desk.plan().tier_jobs
    assert figures("disk.hits", "disk.finds", "disk.promotions", "disk.cascades") == (2, 0, 1, 0)
    desk.absorb(JobReport(job=read.job, good=(True, False), num_bytes=50, seconds=0.25))
    assert figures("disk.promotions", "disk.failed_reads", "disk.failed_promotions") == (0, 1, 0)
    assert figures("disk.bytes_read", "disk.read_s", "host.filled_by_reads") == (50, 0.25, 1)
    assert desk.part.match(longer, 0).tokens == 3 * SIZE
    desk.reserve(longer, [1, 2, 3], 3 * SIZE)
    assert figures("host.hits", "host.lookups") == (3, 7)
    other = Asking("c", 2, 1)
    desk.part.on_arrival(other)
    desk.part.match(other, 0)
    jobs = [job for job in desk.plan().tier_jobs if job.kind is TierJobKind.FIND]
    desk.absorb(JobReport(job=jobs[0].job, good=(False,), error="OSError: out of order"))
    assert figures("disk.failed_finds", "ignored_reports") == (1, 0)
