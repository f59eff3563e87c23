"""The manager of the tiers: rules one by one, and all of them at random (TIR-10 .. TIR-22, TIR-34)."""

import random
from dataclasses import dataclass, field

import pytest

from octavo.features.transfer.control.evict import make_policy
from octavo.features.transfer.control.primary import PrimaryTier
from octavo.features.transfer.control.tier_books import TierFacts
from octavo.features.transfer.control.tiers import Found, Lookup, TierStack
from octavo.features.transfer.plan import JobReport, TierJobKind

FIND, READ, WRITE = TierJobKind.FIND, TierJobKind.READ, TierJobKind.WRITE


class Rig:
    """A stack and a clock that is set by hand."""

    def __init__(self, rows=8, tiers=("disk",), policy="lru", patience_s=2.0, chunk_bytes=0, greedy=()):
        self.now = 0.0
        self.stack = TierStack(
            PrimaryTier(rows, make_policy(policy, rows)),
            [TierFacts(name=name, wants_all=name in greedy) for name in tiers],
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


def test_what_was_stored_is_found_and_loaded():
    rig = Rig(tiers=())
    rig.stack.open("a")
    assert rig.stack.lookup("a", keys("xy")) == Lookup(0, Found.MISS)
    assert rig.store("a", keys("xy")) == list(keys("xy"))
    rig.stack.close("a")
    rig.stack.open("b")
    assert rig.stack.lookup("b", keys("xyz")) == Lookup(2, Found.MISS)
    loads = rig.stack.begin_load(keys("xy"))
    assert rig.stack.source("b", keys("xy")) == "host" and all(chunk.pins == 1 for chunk in loads)
    rig.stack.end_load(loads)
    rig.stack.check()
    assert not rig.stack.has_pending_work


def test_a_chunk_that_is_being_stored_is_pending_and_no_hit():
    rig = Rig(tiers=())
    rig.stack.open("a")
    rig.stack.open("b")
    (chunk,) = rig.stack.begin_store("a", keys("x"))
    assert rig.stack.lookup("b", keys("x")) == Lookup(0, Found.PENDING)
    assert rig.stack.has_pending_work
    rig.stack.end_store("a", chunk, False)
    assert rig.stack.lookup("b", keys("x")) == Lookup(0, Found.MISS)


def test_a_stored_chunk_goes_to_every_tier_and_stays_until_each_has_it():
    rig = Rig(rows=1, tiers=("disk", "far"))
    rig.stack.open("a")
    rig.store("a", keys("x"))
    disk, far = rig.jobs(WRITE, WRITE)
    assert rig.store("a", keys("y")) == []  # the only row is pinned twice
    rig.answer(disk)
    assert rig.store("a", keys("y")) == []
    rig.answer(far)
    assert rig.store("a", keys("y")) == [b"y"]


def test_a_prefix_is_asked_for_and_promoted_in_one_batch_each():
    rig = Rig()
    rig.stack.open("a")
    assert rig.stack.lookup("a", keys("xyz")) == Lookup(0, Found.RETRY)
    (find,) = rig.jobs(FIND)
    assert find.keys == keys("xyz")
    assert rig.stack.lookup("a", keys("xyz")) == Lookup(0, Found.RETRY)
    rig.jobs()  # asked once
    rig.stack.absorb(JobReport(job=find.job, good=(True, True, False)))
    assert rig.stack.lookup("a", keys("xyz")) == Lookup(0, Found.PENDING)
    assert rig.stack.lookup("a", keys("xyz")) == Lookup(0, Found.PENDING)
    (read,) = rig.jobs(READ)
    assert read.keys == keys("xy") and len(set(read.rows)) == 2
    rig.answer(read)
    assert rig.stack.lookup("a", keys("xyz")) == Lookup(2, Found.MISS)
    assert rig.stack.source("a", keys("xy")) == "file" and len(rig.stack.begin_load(keys("xy"))) == 2


def test_two_requests_that_want_the_same_start_one_promotion():
    rig = Rig()
    for name in "ab":
        rig.stack.open(name)
        assert rig.stack.lookup(name, keys("x")).state is Found.RETRY
    (find,) = rig.jobs(FIND)
    rig.answer(find)
    assert [rig.stack.lookup(name, keys("x")).state for name in "ab"] == [Found.PENDING] * 2
    (read,) = rig.jobs(READ)
    rig.answer(read)
    assert [rig.stack.lookup(name, keys("x")) for name in "ab"] == [Lookup(1, Found.HIT)] * 2
    assert rig.stack.source("a", keys("x")) == "file" and rig.stack.source("b", keys("x")) == "host"


def test_tiers_are_asked_in_order_and_only_those_that_the_request_may_use():
    rig = Rig(tiers=("disk", "far"))
    rig.stack.open("a")
    rig.stack.open("b", only=("far",))
    assert rig.stack.lookup("a", keys("x")).state is Found.RETRY
    assert rig.stack.lookup("b", keys("x")).state is Found.RETRY
    first, second = rig.jobs(FIND, FIND)
    assert (first.tier, second.tier) == (0, 1)
    rig.answer(first, second, good=False)
    assert rig.stack.lookup("b", keys("x")).state in (Found.MISS, Found.RETRY)
    assert rig.stack.lookup("a", keys("x")).state is Found.RETRY
    jobs = rig.stack.take_jobs()
    assert {job.tier for job in jobs} == {1}
    rig.answer(*jobs, good=False)
    assert rig.stack.lookup("a", keys("x")) == rig.stack.lookup("b", keys("x")) == Lookup(0, Found.MISS)


def test_a_failed_promotion_is_a_miss_and_is_not_tried_again():
    rig = Rig()
    rig.stack.open("a")
    rig.stack.lookup("a", keys("xy"))
    rig.answer(*rig.jobs(FIND))
    rig.stack.lookup("a", keys("xy"))
    (read,) = rig.jobs(READ)
    rig.stack.absorb(JobReport(job=read.job, good=(True, False)))
    assert rig.stack.lookup("a", keys("xy")) == Lookup(1, Found.MISS)
    rig.jobs()
    assert rig.stack.stats()["disk.failed_reads"] == 1


def test_a_full_primary_makes_a_miss_and_no_endless_retry():
    rig = Rig(rows=1)
    rig.stack.open("a")
    rig.store("a", keys("p"))
    (write,) = rig.jobs(WRITE)  # keeps the row
    rig.stack.open("b")
    rig.stack.lookup("b", keys("x"))
    rig.answer(*rig.jobs(FIND))
    assert rig.stack.lookup("b", keys("x")) == Lookup(0, Found.MISS)
    assert rig.stack.stats()["host.no_room"] == 1
    rig.answer(write)


def test_a_promotion_never_pushes_out_the_beginning_of_its_own_prefix():
    rig = Rig(rows=2, tiers=("disk",))
    rig.stack.open("a")
    rig.store("a", keys("xy"))
    rig.answer(*rig.jobs(WRITE))
    rig.stack.open("b")
    assert rig.stack.lookup("b", keys("xyz")).state is Found.RETRY
    rig.answer(*rig.jobs(FIND))
    assert rig.stack.lookup("b", keys("xyz")) == Lookup(2, Found.MISS)
    assert len(rig.stack.begin_load(keys("xy"))) == 2


def test_a_tier_that_does_not_answer_is_a_miss_after_a_while_for_all_that_ask():
    rig = Rig(patience_s=2.0)
    rig.stack.open("a")
    assert rig.stack.lookup("a", keys("x")).state is Found.RETRY
    (find,) = rig.jobs(FIND)
    rig.now = 2.5
    assert rig.stack.lookup("a", keys("x")).state is Found.MISS
    rig.stack.open("b")
    assert rig.stack.lookup("b", keys("x")).state is Found.MISS  # it is not waited for twice
    rig.answer(find)  # late
    rig.stack.open("c")
    assert rig.stack.lookup("c", keys("x")).state is Found.RETRY


def test_a_promotion_that_takes_too_long_is_a_miss_and_its_row_is_safe():
    rig = Rig(rows=1, patience_s=2.0)
    rig.stack.open("a")
    rig.stack.lookup("a", keys("x"))
    rig.answer(*rig.jobs(FIND))
    rig.stack.lookup("a", keys("x"))
    (read,) = rig.jobs(READ)
    rig.now = 3.0
    assert rig.stack.lookup("a", keys("x")).state is Found.MISS
    assert rig.store("a", keys("y")) == []  # the tier may still write there
    rig.answer(read)
    assert rig.store("a", keys("y")) == [b"y"]


def test_a_tier_that_wants_all_of_a_request_gets_what_the_primary_had_and_what_was_on_its_way():
    rig = Rig()
    rig.stack.open("a")
    rig.store("a", keys("x"))
    rig.answer(*rig.jobs(WRITE))
    (y,) = rig.stack.begin_store("a", keys("y"))
    (z,) = rig.stack.begin_store("a", keys("z"))
    rig.stack.open("b", wants_all=True)
    assert rig.store("b", keys("xyz")) == []
    (write,) = rig.jobs(WRITE)
    assert write.keys == keys("x")
    rig.stack.close("b")
    rig.jobs()
    assert rig.stack.has_pending_work
    rig.stack.end_store("a", y, True)
    rig.stack.end_store("a", z, False)
    jobs = rig.jobs(WRITE)
    assert jobs[0].keys == keys("yy")  # its own cascade and the parked one's
    rig.answer(write, *jobs)
    assert not rig.stack.has_pending_work
    rig.stack.check()


def test_one_tier_may_want_all_where_another_does_not():
    rig = Rig(tiers=("disk", "far"), greedy=("far",))
    rig.stack.open("a")
    assert rig.stack.wants_all("a")
    rig.store("a", keys("x"))
    rig.answer(*rig.jobs(WRITE, WRITE))
    (y,) = rig.stack.begin_store("a", keys("y"))
    rig.stack.open("b")
    assert rig.store("b", keys("xy")) == []
    (write,) = rig.jobs(WRITE)
    assert write.keys == keys("x") and write.tier == 1
    rig.stack.end_store("a", y, True)
    rig.stack.close("b")
    jobs = rig.jobs(WRITE, WRITE)
    assert [job.keys for job in jobs] == [keys("y"), keys("yy")]  # its own cascade, and the parked one's to one tier
    rig.answer(write, *jobs)
    assert not rig.stack.has_pending_work


def test_tiers_that_a_request_does_not_name_are_not_given_its_chunks():
    rig = Rig(tiers=("disk", "far"))
    assert rig.stack.names == {"host", "file", "disk", "far"}
    rig.stack.open("a", only=("far",))
    rig.store("a", keys("x"))
    (write,) = rig.jobs(WRITE)
    assert write.tier == 1
    rig.stack.open("b", only=())
    rig.store("b", keys("y"))
    rig.jobs()
    rig.stack.open("c", wants_all=True, only=("disk",))
    rig.store("c", keys("y"))
    (late,) = rig.jobs(WRITE)
    assert late.tier == 0 and late.keys == keys("y")


def test_reports_that_come_twice_or_for_nobody_change_nothing():
    rig = Rig()
    rig.stack.open("a")
    rig.store("a", keys("x"))
    (write,) = rig.jobs(WRITE)
    rig.answer(write, write)
    rig.stack.absorb(JobReport(job=77, good=(True,)))
    rig.stack.check()
    assert rig.stack.stats()["ignored_reports"] == 2


def test_a_report_of_another_length_counts_as_failed():
    rig = Rig()
    rig.stack.open("a")
    rig.stack.lookup("a", keys("xy"))
    (find,) = rig.jobs(FIND)
    rig.stack.absorb(JobReport(job=find.job, good=(True,)))
    assert rig.stack.lookup("a", keys("xy")).state is Found.MISS


def test_a_slow_tier_gets_fewer_stores():
    rig = Rig(rows=400)
    rig.stack.open("a")
    rig.store("a", keys("x"))
    rig.answer(*rig.jobs(WRITE), seconds=1.0)
    many = [b"%d" % i for i in range(200)]
    rig.store("a", many)
    (job,) = rig.stack.take_jobs()
    assert len(job.keys) == 10 and rig.stack.stats()["disk.dropped"] == 190


def test_what_is_faster_to_compute_is_not_read_but_tried_now_and_then():
    rig = Rig(rows=100, chunk_bytes=1 << 20)
    rig.stack.open("a")
    rig.stack.lookup("a", keys("x"), compute_s=0.1)
    rig.answer(*rig.jobs(FIND))
    rig.stack.lookup("a", keys("x"), compute_s=0.1)
    (read,) = rig.jobs(READ)
    rig.stack.absorb(JobReport(job=read.job, good=(True,), num_bytes=1 << 20, seconds=0.5))  # 2 MiB a second
    rig.stack.open("b")
    assert rig.stack.lookup("b", keys("xy"), compute_s=0.1) == Lookup(1, Found.MISS)  # what is in the host is used
    rig.jobs()
    assert rig.stack.lookup("b", keys("xy"), compute_s=1.0).state is Found.RETRY
    rig.jobs(FIND)
    states = [rig.stack.lookup("b", (b"%d" % i,), compute_s=0.1).state for i in range(130)]
    assert states.count(Found.RETRY) == 2 and rig.stack.stats()["disk.not_worth"] == 131


def test_a_reset_forgets_all_but_waits_for_whoever_is_at_a_row():
    rig = Rig(rows=3)
    rig.stack.open("a")
    rig.store("a", keys("x"))
    (write,) = rig.jobs(WRITE)
    (chunk,) = rig.stack.begin_store("a", keys("y"))
    assert rig.stack.reset() is False  # the disk still has what it had
    rig.stack.check()
    assert rig.stack.lookup("a", keys("x")).state is Found.RETRY
    assert len(rig.store("a", keys("pqr"))) == 1  # two rows are in use
    rig.stack.end_store("a", chunk, True)
    rig.answer(write)
    assert rig.stack.primary.get(b"y") is None and rig.stack.primary.num_free == 2
    assert Rig(tiers=()).stack.reset() is True


# ---- everything at random ---------------------------------------------------------------------


@dataclass
class Request:
    """One simulated request: its prefix, and what it is doing."""

    name: str
    keys: tuple
    loading: list = field(default_factory=list)
    waited: float = 0.0
    settled: bool = False


class Simulation:
    """Requests, tiers that succeed, fail, stall, lose, answer twice and out of order, and the bytes of every row."""

    def __init__(self, seed, rows=12, num_tiers=2):
        self.chance = random.Random(seed)
        self.rig = Rig(
            rows=rows,
            tiers=[f"t{i}" for i in range(num_tiers)],
            policy=self.chance.choice(["lru", "arc"]),
            patience_s=30,
        )
        self.stack = self.rig.stack
        self.rows = [None] * rows  # what the memory holds
        self.tiers = [set() for _ in range(num_tiers)]
        self.in_flight = []  # jobs given out and not carried out
        self.done = []  # carried out and not reported, or to be reported again
        self.copying = []  # (request, chunk) on the way from the device
        self.requests = {}
        self.count = 0
        self.longest_wait = 0.0

    def step(self):
        self.rig.now += self.chance.choice([0.0, 0.1, 1.0])
        for act in self.chance.choices(
            [self.arrive, self.ask, self.ask, self.load, self.end_load, self.store, self.copied, self.leave, self.work,
             self.work, self.report, self.reset],
            weights=[5, 5, 5, 5, 5, 6, 6, 3, 6, 6, 6, 0.1], k=6,
        ):  # fmt: skip
            act()
        self.in_flight += self.stack.take_jobs()
        self.stack.check()

    def some(self):
        return self.chance.choice(list(self.requests.values())) if self.requests else None

    def arrive(self):
        if len(self.requests) > 8:
            return
        self.count += 1
        family, length = self.chance.randrange(4), self.chance.randint(1, 9)
        name = f"r{self.count}"
        self.requests[name] = Request(name, tuple(b"%d.%d" % (family, i) for i in range(length)))
        only = self.chance.choice([None, None, ("t0",), ("t1",), ()])
        self.stack.open(name, wants_all=self.chance.random() < 0.2, only=only)

    def ask(self):
        req = self.some()
        if req is None or req.loading:
            return
        found = self.stack.lookup(req.name, req.keys)
        assert (found.state is Found.HIT) == (found.num_ready == len(req.keys))
        if found.state in (Found.RETRY, Found.PENDING):
            req.waited = req.waited or self.rig.now
            self.longest_wait = max(self.longest_wait, self.rig.now - req.waited)
        else:
            req.waited, req.settled = 0.0, True

    def load(self):
        req = self.some()
        if req is None or req.loading:
            return
        found = self.stack.lookup(req.name, req.keys)
        if found.num_ready:
            req.loading = list(self.stack.begin_load(req.keys[: found.num_ready]))

    def end_load(self):
        req = self.some()
        if req is not None and req.loading:
            self.finish_load(req)

    def finish_load(self, req):
        for chunk in req.loading:  # to the last moment, the row holds what it should
            assert self.rows[chunk.row] == chunk.key
        self.stack.end_load(req.loading)
        req.loading = []

    def store(self):
        req = self.some()
        if req is None:
            return
        first = self.chance.randrange(len(req.keys))
        self.copying += [(req.name, c) for c in self.stack.begin_store(req.name, req.keys[first : first + 4])]

    def copied(self):
        if not self.copying:
            return
        name, chunk = self.copying.pop(self.chance.randrange(len(self.copying)))
        good = self.chance.random() < 0.9
        self.rows[chunk.row] = chunk.key if good else b"half of it"
        self.stack.end_store(name, chunk, good)

    def leave(self):
        req = self.some()
        if req is None:
            return
        if req.loading:
            self.finish_load(req)
        del self.requests[req.name]
        self.stack.close(req.name)

    def work(self):
        """Some tier does one of its jobs, in any order, well or badly."""
        if not self.in_flight:
            return
        job = self.in_flight.pop(self.chance.randrange(len(self.in_flight)))
        tier, good = self.tiers[job.tier], []
        down = self.chance.random() < 0.1
        for i, key in enumerate(job.keys):
            fine = not down and self.chance.random() < 0.95
            if job.kind is FIND:
                fine = fine and key in tier
            elif job.kind is READ:
                fine = fine and key in tier
                self.rows[job.rows[i]] = key if fine else b"half of it"
            else:
                assert self.rows[job.rows[i]] == key, "a tier was given something else under this key"
                if fine:
                    tier.add(key)
            good.append(fine)
        if self.chance.random() < 0.05 and tier:
            tier.remove(self.chance.choice(sorted(tier)))  # full, or cleaned by somebody
        seconds = self.chance.choice([0.0, 0.0, 0.01, 0.2])
        self.done.append(JobReport(job=job.job, good=tuple(good), num_bytes=len(job.rows) << 20, seconds=seconds))

    def report(self):
        if not self.done:
            return
        at = self.chance.randrange(len(self.done))
        self.stack.absorb(self.done[at])
        if self.chance.random() < 0.9:  # else it will come again
            del self.done[at]

    def reset(self):
        self.stack.reset()

    def settle(self):
        """Everything ends: nobody asks any more, and all that is under way comes back."""
        for req in list(self.requests.values()):
            if req.loading:
                self.finish_load(req)
            del self.requests[req.name]
            self.stack.close(req.name)
        for _ in range(1000):
            while self.copying:
                self.copied()
            self.in_flight += self.stack.take_jobs()
            if not self.in_flight and not self.done:
                break
            while self.in_flight:
                self.work()
            for report in self.done:
                self.stack.absorb(report)
            self.done = []
        self.stack.check()
        assert not self.stack.has_pending_work
        self.stack.reset()
        assert self.stack.primary.num_free == self.stack.primary.num_rows  # no pin, no row was lost


def simulate(seed, steps):
    simulation = Simulation(seed)
    for _ in range(steps):
        simulation.step()
    simulation.settle()
    assert simulation.longest_wait < 200  # patience for every tier and the primary, a few times over
    assert simulation.stack._askers == {}
    return simulation


@pytest.mark.parametrize("seed", range(12))
def test_no_pin_row_or_request_is_lost_whatever_tiers_do(seed):
    simulation = simulate(seed, 400)
    assert simulation.count > 20 and any(simulation.tiers)


@pytest.mark.slow
def test_no_pin_row_or_request_is_lost_in_a_hundred_thousand_steps():
    for seed in range(100):
        simulate(1000 + seed, 1000)
