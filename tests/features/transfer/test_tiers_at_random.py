"""The manager of the tiers with everything at random: no lost pin, no double free, nobody stuck (TIR-34)."""

import random
from dataclasses import dataclass, field

import pytest

from octavo.features.transfer.address import DEFAULT_TIMEOUT_S
from octavo.features.transfer.control.search import A_STEP, ChunkState
from octavo.features.transfer.plan import JobReport, TierJobKind
from tests.support.tier_rig import Rig

FIND, READ, WRITE = TierJobKind.FIND, TierJobKind.READ, TierJobKind.WRITE
PATIENCE_S = 2.0
GAVE_UP_S = 6 * DEFAULT_TIMEOUT_S  # the longest that a job is waited for
LONGEST_STEP_S = 1.0
MOOD_S = 40.0  # a tier that comes back is dead for so long, and alive for so long

BAD = ("silent", "failing", "trickling", "returning")


@dataclass
class Request:
    """One simulated request: its prefix, and what it is doing."""

    name: str
    keys: tuple
    loading: list = field(default_factory=list)
    waited: float | None = None  # since when


class Simulation:
    """Requests, tiers of every kind, and the bytes of every row.

    A *good* tier loses and fails now and then, out of order, and tells twice. A *silent* one never reports, a *failing*
    one fails always, a *trickling* one does one job after each `DEFAULT_TIMEOUT_S` - 1, a *returning* one is dead and alive
    in turns, and does then what it was given before.
    """

    def __init__(self, seed, kinds, rows=12):
        self.chance = random.Random(seed)
        self.kinds = kinds
        self.rows_count = rows
        self.rig = Rig(
            rows=rows,
            tiers=[f"t{i}" for i in range(len(kinds))],
            policy=self.chance.choice(["lru", "arc"]),
            patience_s=PATIENCE_S,
            chunk_bytes=1 << 20,
        )
        self.stack = self.rig.stack
        self.rows = [None] * rows  # what the memory holds
        self.tiers = [set() for _ in kinds]
        self.in_flight = []  # jobs given out and not carried out
        self.done = []  # carried out and not reported, or to be reported again
        self.copying = []  # (request, chunk) on the way from the device
        self.requests = {}
        self.trickled = [0.0] * len(kinds)
        self.count = self.hits = 0
        self.longest_wait = 0.0
        self.most_in_a_step = 0
        self.most_pinned = 0

    def step(self):
        self.rig.now += self.chance.choice([0.0, 0.1, LONGEST_STEP_S])
        for act in self.chance.choices(
            [self.arrive, self.ask, self.ask, self.load, self.end_load, self.store, self.copied, self.leave, self.work,
             self.work, self.report, self.reset],
            weights=[5, 5, 5, 5, 5, 6, 6, 3, 6, 6, 6, 0.1], k=6,
        ):  # fmt: skip
            act()
        jobs = self.stack.take_jobs()
        self.most_in_a_step = max(self.most_in_a_step, sum(len(job.keys) for job in jobs if job.kind is not WRITE))
        self.in_flight += jobs
        self.stack.check()
        self.look_after()

    def look_after(self):
        """What nobody's misbehaviour may change."""
        held = [
            sum(len(j.rows) for j in self.in_flight if j.tier == t and j.kind is WRITE) for t in range(len(self.kinds))
        ]
        self.most_pinned = max(self.most_pinned, sum(held))
        assert sum(held) <= self.rows_count // 2, "tiers that write hold more than half of the primary"

    def some(self):
        return self.chance.choice(list(self.requests.values())) if self.requests else None

    def arrive(self):
        if len(self.requests) > 8:
            return
        self.count += 1
        family, length = self.chance.randrange(4), self.chance.randint(1, 9)
        name = f"r{self.count}"
        self.requests[name] = Request(name, tuple(b"%d.%d" % (family, i) for i in range(length)))
        only = self.chance.choice([None, None, None, (f"t{self.chance.randrange(len(self.kinds))}",), ()])
        self.stack.open(name, wants_all=self.chance.random() < 0.2, only=only)

    def ask(self):
        req = self.some()
        if req is not None and not req.loading:
            self.look_up(req)

    def look_up(self, req):
        compute_s = self.chance.choice([0.0, 0.05])
        found = self.stack.lookup(req.name, req.keys, compute_s)
        assert (found.state is ChunkState.HIT) == (found.num_ready == len(req.keys))
        if found.state in (ChunkState.RETRY, ChunkState.PENDING):
            req.waited = self.rig.now if req.waited is None else req.waited
            self.longest_wait = max(self.longest_wait, self.rig.now - req.waited)
        else:
            req.waited = None
        return found

    def load(self):
        req = self.some()
        if req is None or req.loading:
            return
        found = self.look_up(req)
        if found.num_ready:
            self.hits += found.num_ready
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

    # ---- tiers --------------------------------------------------------------------------------------

    def works(self, number):
        """Does this tier do anything now?"""
        kind = self.kinds[number]
        if kind == "trickling":
            if self.rig.now - self.trickled[number] < DEFAULT_TIMEOUT_S - 1:
                return False
            self.trickled[number] = self.rig.now
        return kind != "silent" and not (kind == "returning" and self.rig.now % (2 * MOOD_S) < MOOD_S)

    def work(self, always=False):
        """Some tier does one of its jobs, in any order, well or badly."""
        if not self.in_flight:
            return
        job = self.chance.choice(self.in_flight)
        if always or self.works(job.tier):
            self.in_flight.remove(job)
            self.do(job)

    def do(self, job):
        tier, good = self.tiers[job.tier], []
        down = self.kinds[job.tier] == "failing" or self.chance.random() < 0.1
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
        seconds, error = self.chance.choice([0.0, 0.0, 0.01, 0.2]), "OSError: down" if down else None
        self.done.append(
            JobReport(job=job.job, good=tuple(good), num_bytes=sum(good) << 20, seconds=seconds, error=error)
        )

    def report(self):
        if not self.done:
            return
        at = self.chance.randrange(len(self.done))
        self.stack.absorb(self.done[at])
        if self.chance.random() < 0.9:  # else it will come again
            del self.done[at]

    def reset(self):
        self.stack.reset()

    # ---- the end --------------------------------------------------------------------------------------

    def settle(self):
        """Nobody asks any more. First tiers do as before: all must be idle; then all that is under way comes back."""
        for req in list(self.requests.values()):
            if req.loading:
                self.finish_load(req)
            del self.requests[req.name]
            self.stack.close(req.name)
        while self.copying:
            self.copied()
        began = self.rig.now
        while self.stack.has_pending_work:  # a job may not have been given out yet: a limit for it, and one more step
            self.rig.now += LONGEST_STEP_S
            self.in_flight += self.stack.take_jobs()
            assert self.rig.now - began <= 2 * GAVE_UP_S, "work is pending for ever"
        self.stack.check()
        assert self.stack.num_known == 0, "an ended request is parked for ever"
        while self.in_flight:
            self.work(always=True)
        for report in self.done:
            self.stack.absorb(report)
        self.stack.check()
        self.stack.reset()
        assert self.stack.primary.num_free == self.stack.primary.num_rows, "a pin or a row was lost"


def simulate(seed, steps, kinds):
    simulation = Simulation(seed, kinds)
    for _ in range(steps):
        simulation.step()
    simulation.settle()
    # patience, and what computing nine chunks takes; or four times the patience where nobody knows. A step may be long.
    assert simulation.longest_wait <= 5 * PATIENCE_S + LONGEST_STEP_S
    assert simulation.most_in_a_step <= A_STEP
    return simulation


@pytest.mark.parametrize("seed", range(8))
def test_no_pin_row_or_request_is_lost_whatever_tiers_do(seed):
    simulation = simulate(seed, 400, ("good", "good"))
    assert simulation.count > 20 and any(simulation.tiers) and simulation.hits


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("place", ["first", "last", "alone"])
def test_nor_beside_a_bad_tier(bad, place):
    """F32, F33, F34."""
    kinds = {"first": (bad, "good"), "last": ("good", bad), "alone": (bad,)}[place]
    simulation = simulate(100, 2000, kinds)  # with a tier that trickles, three runs of 400 steps in ten read nothing
    assert simulation.count > 20
    if place != "alone":
        good = kinds.index("good")
        assert simulation.tiers[good] and simulation.stack.stats()[f"t{good}.bytes_read"] > 0  # it is used all the same


@pytest.mark.parametrize("seed", range(3))
def test_nor_among_four_bad_ones(seed):
    simulation = simulate(200 + seed, 400, (*BAD, "good"))
    assert simulation.count > 20


@pytest.mark.slow
def test_no_pin_row_or_request_is_lost_in_a_hundred_thousand_steps(capsys):
    """Shows what it did: `-s`."""
    totals, longest_wait, most_pinned = {}, 0.0, 0
    for seed in range(100):
        kinds = [("good", "good"), (*BAD, "good"), *((bad, "good") for bad in BAD), *(("good", bad) for bad in BAD)]
        simulation = simulate(1000 + seed, 1000, kinds[seed % len(kinds)])
        longest_wait = max(longest_wait, simulation.longest_wait)
        most_pinned = max(most_pinned, simulation.most_pinned)
        stats = simulation.stack.stats()
        for number in range(len(simulation.kinds)):
            for name in ("late", "hits", "failed_reads", "failed_writes", "refused", "dropped"):
                totals[name] = totals.get(name, 0) + stats[f"t{number}.{name}"]
    assert all(totals.values()), totals
    with capsys.disabled():
        print(f"\n100,000 steps: longest wait {longest_wait:.1f} s, most rows pinned {most_pinned} of 12; {totals}")
