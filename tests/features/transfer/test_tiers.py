"""The manager of the tiers: its rules one by one (TIR-10 .. TIR-22)."""

from octavo.features.transfer.control.search import ChunkState, PrefixLookup
from octavo.features.transfer.plan import JobReport, TierJobKind
from tests.support.tier_rig import Rig, keys

FIND, READ, WRITE = TierJobKind.FIND, TierJobKind.READ, TierJobKind.WRITE


def test_what_was_stored_is_found_and_loaded():
    rig = Rig(tiers=())
    rig.stack.open("a")
    assert rig.stack.lookup("a", keys("xy")) == PrefixLookup(0, ChunkState.MISS)
    assert rig.store("a", keys("xy")) == list(keys("xy"))
    rig.stack.close("a")
    rig.stack.open("b")
    assert rig.stack.lookup("b", keys("xyz")) == PrefixLookup(2, ChunkState.MISS)
    loads = rig.stack.begin_load(keys("xy"))
    assert rig.stack.sources("b", keys("xy")) == ("host", "host") and all(chunk.pins == 1 for chunk in loads)
    rig.stack.end_load(loads)
    rig.stack.check()
    assert not rig.stack.has_pending_work


def test_a_chunk_that_is_being_stored_is_pending_and_no_hit():
    rig = Rig(tiers=())
    rig.stack.open("a")
    rig.stack.open("b")
    (chunk,) = rig.stack.begin_store("a", keys("x"))
    assert rig.stack.lookup("b", keys("x")) == PrefixLookup(0, ChunkState.PENDING)
    assert rig.stack.has_pending_work
    rig.stack.end_store("a", chunk, False)
    assert rig.stack.lookup("b", keys("x")) == PrefixLookup(0, ChunkState.MISS)


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
    assert rig.stack.lookup("a", keys("xyz")) == PrefixLookup(0, ChunkState.RETRY)
    (find,) = rig.jobs(FIND)
    assert find.keys == keys("xyz")
    assert rig.stack.lookup("a", keys("xyz")) == PrefixLookup(0, ChunkState.RETRY)
    rig.jobs()  # asked once
    rig.stack.absorb(JobReport(job=find.job, good=(True, True, False)))
    assert rig.stack.lookup("a", keys("xyz")) == PrefixLookup(0, ChunkState.PENDING)
    assert rig.stack.lookup("a", keys("xyz")) == PrefixLookup(0, ChunkState.PENDING)
    (read,) = rig.jobs(READ)
    assert read.keys == keys("xy") and len(set(read.rows)) == 2
    rig.answer(read)
    assert rig.stack.lookup("a", keys("xyz")) == PrefixLookup(2, ChunkState.MISS)
    assert rig.stack.sources("a", keys("xy")) == ("file", "file") and len(rig.stack.begin_load(keys("xy"))) == 2


def test_two_requests_that_want_the_same_start_one_promotion():
    rig = Rig()
    for name in "ab":
        rig.stack.open(name)
        assert rig.stack.lookup(name, keys("x")).state is ChunkState.RETRY
    (find,) = rig.jobs(FIND)
    rig.answer(find)
    assert [rig.stack.lookup(name, keys("x")).state for name in "ab"] == [ChunkState.PENDING] * 2
    (read,) = rig.jobs(READ)
    rig.answer(read)
    assert [rig.stack.lookup(name, keys("x")) for name in "ab"] == [PrefixLookup(1, ChunkState.HIT)] * 2
    assert rig.stack.sources("a", keys("x")) == ("file",) and rig.stack.sources("b", keys("x")) == ("host",)


def test_all_tiers_are_asked_at_once_and_only_those_that_the_request_may_use():
    """F32, TIR-10."""
    rig = Rig(tiers=("disk", "far"))
    rig.stack.open("a")
    rig.stack.open("b", only=("far",))
    assert rig.stack.lookup("b", keys("y")).state is ChunkState.RETRY
    assert rig.stack.lookup("a", keys("x")).state is ChunkState.RETRY
    first, second = rig.jobs(FIND, FIND)
    assert (first.tier, first.keys) == (0, keys("x")) and (second.tier, second.keys) == (1, keys("yx"))
    rig.answer(second, good=False)
    assert rig.stack.lookup("b", keys("y")) == PrefixLookup(0, ChunkState.MISS)  # nobody else may have it
    assert rig.stack.lookup("a", keys("x")).state is ChunkState.RETRY
    rig.answer(first, good=False)
    assert rig.stack.lookup("a", keys("x")) == PrefixLookup(0, ChunkState.MISS)
    rig.jobs()


def test_of_two_tiers_that_have_a_chunk_the_first_gives_it_and_the_second_if_that_fails():
    rig = Rig(tiers=("disk", "far"))
    rig.stack.open("a")
    rig.stack.lookup("a", keys("x"))
    rig.answer(*rig.jobs(FIND, FIND))
    assert rig.stack.lookup("a", keys("x")).state is ChunkState.PENDING
    (read,) = rig.jobs(READ)
    assert read.tier == 0
    rig.answer(read, good=False)
    assert rig.stack.lookup("a", keys("x")).state is ChunkState.PENDING
    (read,) = rig.jobs(READ)
    assert read.tier == 1
    rig.answer(read)
    assert rig.stack.lookup("a", keys("x")) == PrefixLookup(1, ChunkState.HIT)


def test_tiers_are_named_by_address_medium_or_locality():
    """TIR-10."""
    rig = Rig(tiers=("disk", "far"), remote=("far",))
    for number, (name, tiers) in enumerate([("local", {0}), ("remote", {1}), ("far", {1}), ("file", {0, 1})]):
        rig.stack.open(name, only=(name,))
        rig.stack.lookup(name, (b"%d" % number,))
        assert {job.tier for job in rig.stack.take_jobs()} == tiers


def test_a_failed_promotion_is_a_miss_and_is_not_tried_again():
    rig = Rig()
    rig.stack.open("a")
    rig.stack.lookup("a", keys("xy"))
    rig.answer(*rig.jobs(FIND))
    rig.stack.lookup("a", keys("xy"))
    (read,) = rig.jobs(READ)
    rig.stack.absorb(JobReport(job=read.job, good=(True, False)))
    assert rig.stack.lookup("a", keys("xy")) == PrefixLookup(1, ChunkState.MISS)
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
    assert rig.stack.lookup("b", keys("x")) == PrefixLookup(0, ChunkState.MISS)
    assert rig.stack.stats()["host.no_room"] == 1
    rig.answer(write)


def test_a_promotion_never_pushes_out_the_beginning_of_its_own_prefix():
    rig = Rig(rows=2, tiers=("disk",))
    rig.stack.open("a")
    rig.store("a", keys("xy"))
    rig.answer(*rig.jobs(WRITE))
    rig.stack.open("b")
    assert rig.stack.lookup("b", keys("xyz")).state is ChunkState.RETRY
    rig.answer(*rig.jobs(FIND))
    assert rig.stack.lookup("b", keys("xyz")) == PrefixLookup(2, ChunkState.MISS)
    assert len(rig.stack.begin_load(keys("xy"))) == 2


def test_a_tier_that_does_not_answer_is_a_miss_after_a_while_for_all_that_ask():
    rig = Rig(patience_s=2.0)
    rig.stack.open("a")
    assert rig.stack.lookup("a", keys("x")).state is ChunkState.RETRY
    (find,) = rig.jobs(FIND)
    rig.now = 2.5
    assert rig.stack.lookup("a", keys("x")).state is ChunkState.MISS
    rig.stack.open("b")
    assert rig.stack.lookup("b", keys("x")).state is ChunkState.MISS  # it is not waited for twice
    rig.answer(find)  # late
    rig.stack.open("c")
    assert rig.stack.lookup("c", keys("x")).state is ChunkState.RETRY


def test_a_promotion_that_takes_too_long_is_a_miss_and_its_row_is_safe():
    rig = Rig(rows=1, patience_s=2.0)
    rig.stack.open("a")
    rig.stack.lookup("a", keys("x"))
    rig.answer(*rig.jobs(FIND))
    rig.stack.lookup("a", keys("x"))
    (read,) = rig.jobs(READ)
    rig.now = 3.0
    assert rig.stack.lookup("a", keys("x")).state is ChunkState.MISS
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
    rig = Rig(rows=16, tiers=("disk", "far"), greedy=("far",))
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
    assert rig.stack.names == {"host", "file", "local", "disk", "far"}
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
    assert rig.stack.lookup("a", keys("xy")).state is ChunkState.MISS


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
    assert rig.stack.lookup("b", keys("xy"), compute_s=0.1) == PrefixLookup(
        1, ChunkState.MISS
    )  # what is in the host is used
    rig.jobs()
    rig.stack.open("c")
    assert rig.stack.lookup("c", keys("xy"), compute_s=1.0).state is ChunkState.RETRY
    rig.jobs(FIND)
    waits = []
    for i in range(130):
        rig.stack.open(f"r{i}")
        waits.append(rig.stack.lookup(f"r{i}", (b"%d" % i,), compute_s=0.1).state is ChunkState.RETRY)
    assert sum(waits) == 2 and rig.stack.stats()["disk.not_worth"] == 131
    tried = waits.index(True)
    assert (
        rig.stack.lookup(f"r{tried}", (b"%d" % tried,), compute_s=0.1).state is ChunkState.RETRY
    )  # until it is answered


def test_a_reset_forgets_all_but_waits_for_whoever_is_at_a_row():
    rig = Rig(rows=3)
    rig.stack.open("a")
    rig.store("a", keys("x"))
    (write,) = rig.jobs(WRITE)
    (chunk,) = rig.stack.begin_store("a", keys("y"))
    assert rig.stack.reset() is False  # the disk still has what it had
    rig.stack.check()
    assert rig.stack.lookup("a", keys("x")).state is ChunkState.RETRY
    assert len(rig.store("a", keys("pqr"))) == 1  # two rows are in use
    rig.stack.end_store("a", chunk, True)
    rig.answer(write)
    assert rig.stack.primary.get(b"y") is None and rig.stack.primary.num_free == 2
    assert Rig(tiers=()).stack.reset() is True
