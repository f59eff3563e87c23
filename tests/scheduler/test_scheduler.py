"""What runs in the next step, and what does not."""

import itertools
import random

import pytest

from octavo.base.errors import ClientError
from octavo.base.step import PlanPart, StepPlan, StepResult
from octavo.base.types import FinishReason, RequestState
from octavo.scheduler.plan_builder import PlanBuilder
from octavo.scheduler.request import Request
from octavo.scheduler.seams import Absorbed, FinishHold, Late, Match, NullControlPart, Readiness, Retry
from tests.simulate.world import Setup, World, full, window

LONG = tuple(i % 50 for i in range(1900))


def prompt(size: int, start: int = 0) -> tuple[int, ...]:
    return tuple((start + i) % 50 for i in range(size))


class Rule:
    """A constraint made of one function.

    Owns: how often it was asked.
    """

    def __init__(self, cap: object = None, *, admits: object = None, rank: int = 0, decode: bool = False) -> None:
        self._cap, self._admits = cap, admits
        self.rank, self.limits_decode = rank, decode
        self.forgotten: list[str] = []
        self.asked = 0

    def applies(self, req: Request) -> bool:
        return True

    def wait(self, req: Request) -> None:
        return None

    def crowd(self, req: Request) -> None:
        return None

    def admits(self, req: Request, builder: PlanBuilder) -> bool:
        return self._admits is None or self._admits(req)  # type: ignore[operator,no-any-return]

    def cap(self, req: Request, n: int, builder: PlanBuilder) -> int:
        self.asked += 1
        return n if self._cap is None else self._cap(req, n)  # type: ignore[operator,no-any-return]

    def commit(self, req: Request, n: int, builder: PlanBuilder) -> None:
        return None

    def undo(self, req: Request, builder: PlanBuilder) -> None:
        return None

    def forget(self, req: Request) -> None:
        self.forgotten.append(req.request_id)


def counts(plan: StepPlan) -> dict[int, int]:
    return dict(zip(plan.batch.slots.tolist(), plan.batch.num_scheduled_tokens.tolist(), strict=True))


# ---- budgets and shares ---------------------------------------------------------------------


def test_a_long_prompt_does_not_stall_streams_nor_the_short_prompt_behind_it() -> None:
    """SCH-04 (case), SCH-11: 4 streams, 64 tokens a step, a prompt of 1900 tokens, then one of 10."""
    world = World(Setup(num_blocks=700, max_tokens=64, max_model_len=2000, max_num_seqs=8, max_num_active_seqs=8))
    streams = [world.add(prompt(5, i), max_tokens=100, eos=False) for i in range(4)]
    for _ in range(3):
        world.step()
    long = world.add(LONG, max_tokens=3, eos=False)
    world.step()
    short = world.add(prompt(10, 30), max_tokens=3, eos=False)
    before = {name: len(world.told[name].tokens) for name in streams}
    world.step()
    assert world.told[short].tokens, "the short prompt fits beside the long one's chunk"
    assert not world.told[long].tokens
    for _ in range(20):
        world.step()
    assert all(len(world.told[name].tokens) - before[name] == 21 for name in streams), "a stream missed a step"
    assert sum(counts(world.plans[-1]).values()) == 64, "the rest of the step is the long prompt's"
    world.drain()


def test_a_long_prompt_alone_takes_the_whole_step() -> None:
    """SCH-11: the threshold is ignored while only one request exists."""
    world = World(Setup(num_blocks=700, max_tokens=64, max_model_len=2000, threshold=5))
    world.add(LONG)
    world.step()
    assert counts(world.plans[-1]) == {0: 64}
    world.abort("r0")
    world.drain()


def test_a_threshold_cuts_prompts_when_the_fair_share_is_smaller() -> None:
    """SCH-11: the share of 64 tokens among 4 prompts is 16, the threshold 40."""
    world = World(Setup(num_blocks=2100, max_tokens=64, max_model_len=2000, threshold=40))
    for i in range(4):
        world.add(LONG[i:])
    world.step()
    assert counts(world.plans[-1]) == {0: 40, 1: 24}
    for name in world.alive:
        world.abort(name)
    world.drain()


def test_equal_prompts_share_the_step_a_few_side_by_side() -> None:
    world = World(Setup(num_blocks=900, max_tokens=64, max_model_len=100, max_num_seqs=20, max_num_active_seqs=20))
    for i in range(20):
        world.add(prompt(90, i), max_tokens=1, eos=False)
    world.step()
    assert counts(world.plans[-1]) == dict.fromkeys(range(8), 8)
    world.drain()


def test_waiting_prompts_that_find_no_room_do_not_slow_the_one_that_runs() -> None:
    """The share counts those who can take it: with the pool full, the running prompt gets the whole step."""
    world = World(Setup(num_blocks=31, max_tokens=24, max_model_len=100, watermark=0))
    world.add(prompt(98), max_tokens=1)
    world.step()
    world.add(prompt(90, 7), max_tokens=1)
    world.step()
    world.step()
    assert counts(world.plans[-1]) == {0: 24}
    world.drain()


def test_running_requests_may_be_fewer_than_slots() -> None:
    """SCH-2."""
    world = World(Setup(max_num_seqs=6, max_num_active_seqs=2))
    for i in range(5):
        world.add(prompt(3, i), eos=False)
    world.step()
    assert world.scheduler.num_running == 2 and world.scheduler.num_waiting == 3
    assert len(world.scheduler.ledger.free_slots) == 4
    world.drain()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("scored", [False, True])
def test_prompts_at_chunk_and_block_borders_give_one_token_each(depth: int, scored: bool) -> None:
    """SCH-05 (case): lengths around blocks of 16 and chunks of 32, several at once."""
    world = World(
        Setup(specs=(full(16),), num_blocks=60, max_tokens=32, max_model_len=70, depth=depth, max_num_seqs=4, max_num_active_seqs=4)
    )  # fmt: skip
    extra = {"prompt_logprobs": 0} if scored else {}
    names = [world.add(prompt(size, size), max_tokens=1, **extra) for size in (15, 16, 17, 31, 32, 33, 63, 64, 65)]
    world.drain(200)
    for name in names:
        last = world.told[name].last
        assert last is not None and last.finish in ("length", "stop") and len(world.told[name].tokens) == 1


def test_a_request_whose_tokens_in_flight_reach_max_tokens_is_not_scheduled_again() -> None:
    """SCH-31: at depth 3 exactly as many rows are planned as tokens are wanted."""
    world = World(Setup(depth=3))
    world.add(prompt(3), max_tokens=4, eos=False)
    world.drain()
    assert sum(plan.batch.num_rows for plan in world.plans) == 4


def test_every_step_in_flight_counts_its_tokens_as_placeholders() -> None:
    world = World(Setup(depth=3))
    name = world.add(prompt(3), max_tokens=9, eos=False)
    for _ in range(3):
        world.scheduler.schedule()
    req = world.request(name)
    assert (req.num_placeholders, req.num_computed_tokens, req.num_tokens) == (3, 5, 3)


# ---- admission ------------------------------------------------------------------------------


def test_a_second_request_with_a_living_id_is_refused_and_the_first_goes_on() -> None:
    world = World(Setup())
    name = world.add(prompt(3), eos=False)
    with pytest.raises(ClientError, match="'r0' is in use"):
        world.scheduler.add(world.told[name].request)
    world.drain()
    assert len(world.told[name].tokens) == 8


def test_an_id_may_come_back_once_it_has_ended() -> None:
    """REQ-5: aborted with a step in flight, and back at once: nothing of the first life reaches the second."""
    world = World(Setup(depth=2))
    name = world.add(prompt(9), eos=False)
    world.step()
    world.scheduler.abort([name])
    world.told[name].tokens.clear()
    world.scheduler.ledger.take_deltas()
    world.scheduler.add(world.told[name].request)
    world.drain()
    assert len(world.told[name].tokens) == 8


def test_a_request_capped_to_nothing_is_passed_over() -> None:
    """SCH-15, SCH-17."""
    closed = {"r0"}
    world = World(Setup(), constraints=(Rule(lambda req, n: 0 if req.request_id in closed else n),))
    world.add(prompt(3), eos=False)
    world.add(prompt(3, 9), eos=False)
    for _ in range(3):
        world.step()
    assert not world.told["r0"].tokens and len(world.told["r1"].tokens) == 3
    closed.clear()
    world.drain()


def test_a_constraint_may_hold_a_request_before_its_prefix_is_looked_up() -> None:
    closed = {"r0"}
    part = Recorder()
    world = World(Setup(), parts=(part,), constraints=(Rule(admits=lambda req: req.request_id not in closed),))
    world.add(prompt(3))
    world.step()
    assert "match" not in part.calls
    closed.clear()
    world.drain()
    assert "match" in part.calls


def test_a_rule_that_does_not_limit_decoding_costs_nothing_there() -> None:
    """Design 11: caps run on admission and on prompt chunks only."""
    admission, always = Rule(), Rule(decode=True)
    world = World(Setup(), constraints=(admission, always))
    world.add(prompt(3), max_tokens=9, eos=False)
    world.drain()
    assert (admission.asked, always.asked) == (1, 9)
    assert admission.forgotten == always.forgotten == ["r0"]


def test_a_rule_may_hold_back_a_request_that_decodes() -> None:
    """SCH-10: pacing."""
    world = World(Setup())
    rule = Rule(lambda req, n: 0 if req.num_output_tokens and world.steps % 2 else n, decode=True)
    world = World(Setup(), constraints=(rule,))
    world.add(prompt(3), max_tokens=5, eos=False)
    world.drain(30)
    assert world.steps > 6


def test_the_order_of_equal_ranks_does_not_matter() -> None:
    """Design 11: constraints may only lower, so any order gives the same plans."""
    rules = [
        lambda req, n: min(n, 7),
        lambda req, n: n if req.request_id != "r1" else min(n, 3),
        lambda req, n: n - n % 2 if n > 1 else n,
    ]
    seen = set()
    for order in itertools.permutations(rules[:2]):
        constraints = (*(Rule(cap, rank=1) for cap in order), Rule(rules[2], rank=9))
        world = World(Setup(max_tokens=20), constraints=constraints)
        for i in range(4):
            world.add(prompt(15, i), eos=False)
        world.drain()
        seen.add(tuple(tuple(sorted(counts(plan).items())) for plan in world.plans))
    assert len(seen) == 1


def test_a_request_that_can_never_fit_ends_with_an_error_and_the_next_one_runs() -> None:
    """No hang: 9 blocks of 4 hold 36 tokens, the prompt has 50."""
    world = World(Setup(num_blocks=10, watermark=0))
    big = world.add(prompt(50), max_tokens=5)
    small = world.add(prompt(5), max_tokens=5, eos=False)
    world.may_fail.add(big)
    world.drain(30)
    last = world.told[big].last
    assert last is not None and last.finish is FinishReason.ERROR and "needs more KV memory" in (last.error or "")
    assert len(world.told[small].tokens) == 5


def test_a_request_that_outgrows_the_pool_ends_with_an_error() -> None:
    world = World(Setup(num_blocks=10, watermark=0))
    name = world.add(prompt(30), max_tokens=20, eos=False)
    world.may_fail.add(name)
    world.drain(60)
    assert world.told[name].last is not None and world.told[name].last.finish is FinishReason.ERROR
    assert len(world.told[name].tokens) >= 6


def test_paused_nobody_is_admitted_and_those_running_go_on() -> None:
    """SCH-13."""
    world = World(Setup())
    world.add(prompt(3), eos=False)
    world.step()
    world.scheduler.pause()
    world.add(prompt(3, 9), eos=False)
    world.step()
    assert len(world.told["r0"].tokens) == 2 and not world.told["r1"].tokens
    for _ in range(10):
        world.step()
    assert not world.scheduler.has_work()
    world.scheduler.resume()
    assert world.scheduler.has_work()
    world.drain()


def test_the_whole_sequence_must_fit_on_admission() -> None:
    """SCH-24: a chunk would fit, the prompt does not; it waits and preempts nobody."""
    world = World(Setup(num_blocks=20, watermark=0, max_model_len=100))
    world.add(prompt(40), max_tokens=8, eos=False)
    world.add(prompt(40, 5), max_tokens=8, eos=False)
    world.step()
    world.step()
    assert world.scheduler.num_running == 1
    world.drain()
    assert not world.preempted


# ---- preemption -----------------------------------------------------------------------------


def test_a_preempted_request_gives_the_same_answer_and_its_slot_is_told() -> None:
    """SCH-01 (case), SCH-12, SCH-16, SCH-30: resumed rows carry prompt and output, and are marked."""
    world = World(Setup(num_blocks=14, watermark=0))
    for i in range(4):
        world.add(prompt(9, i), max_tokens=20, eos=False, logprobs=0)
    world.drain()
    assert world.preempted
    slots = [slot for plan in world.plans for slot in plan.preempted]
    resumed = [row for plan in world.plans for row in plan.batch.new if row.resumed]
    assert len(slots) == world.scheduler.stats().preemptions == len(resumed)
    assert all(len(row.tokens) >= row.num_prompt_tokens == 9 for row in resumed)


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    """SCH-13."""
    world = World(Setup(num_blocks=14, watermark=0))
    for i in range(6):
        world.add(prompt(9, i), max_tokens=20, eos=False)
    world.drain()
    assert any(plan.preempted for plan in world.plans)
    assert not [plan for plan in world.plans if plan.preempted and plan.batch.new]


def test_the_worst_priority_gives_way_and_the_best_never_does() -> None:
    """SCH-12."""
    world = World(Setup(num_blocks=14, watermark=0, policy="priority"))
    names = [world.add(prompt(9, i), max_tokens=20, eos=False, priority=3 - i) for i in range(4)]
    world.drain()
    assert names[3] not in world.preempted and names[0] in world.preempted


def test_finished_slots_are_told_once() -> None:
    world = World(Setup())
    for i in range(9):
        world.add(prompt(3, i), max_tokens=1 + i % 3, eos=False)
    world.drain()
    entered = sum(len(plan.batch.new) for plan in world.plans)
    dropped = sum(len(plan.finished) for plan in world.plans) + len(world.scheduler.ledger.finished_slots)
    assert entered == dropped == 9


# ---- parts ----------------------------------------------------------------------------------


class Ping(PlanPart, frozen=True):
    """Nothing, said."""


class Recorder(NullControlPart):
    """A part whose answers are set by the test.

    Owns: the answers and the calls.
    """

    name = "recorder"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.offer: Match | Retry = Match()
        self.ready: list[Readiness] = []
        self.state = RequestState.WAITING
        self.share: PlanPart | Late | None = None
        self.deadline: float | None = None
        self.reserved: list[tuple[int, int]] = []  # blocks, external tokens
        self.local: int | None = None
        self.ids: list[str] = []

    def on_arrival(self, req: Request) -> RequestState:
        self.calls.append("on_arrival")
        return self.state

    def match(self, req: Request, local_tokens: int) -> Match | Retry:
        self.calls.append("match")
        self.ids.append(req.request_id)
        self.local = local_tokens
        return self.offer

    def after_reserve(self, req: Request, block_ids: object, external_tokens: int) -> None:
        self.calls.append("after_reserve")
        self.reserved.append((len(block_ids[0]), external_tokens))  # type: ignore[index]

    def plan(self, builder: PlanBuilder) -> PlanPart | Late | None:
        return self.share

    def supply(self, plan: StepPlan) -> PlanPart | None:
        return Ping()

    def absorb(self, result: StepResult) -> Absorbed:
        ready, self.ready = tuple(self.ready), []
        return Absorbed(ready)

    def next_deadline(self) -> float | None:
        return self.deadline


def test_an_offer_counts_only_when_it_beats_the_local_hit() -> None:
    """SCH-13: strictly longer."""
    part = Recorder()
    world = World(Setup(), parts=(part,))
    world.add(prompt(20), max_tokens=1, eos=False)
    world.drain()
    part.offer = Match(16, wait=True)
    part.reserved.clear()
    name = world.add(prompt(20), max_tokens=1, eos=False)
    world.step()
    assert part.local == 16 and part.reserved == [(5, 0)]
    last = world.told[name].last
    assert last is not None and last.num_cached_tokens == 16 and last.cached_by_source == {"device": 16}
    world.drain()


def test_a_waiting_load_parks_the_request_and_lets_others_pass() -> None:
    """SCH-15: it waits in WAITING_KV with its blocks, and goes on with what is really there."""
    part = Recorder()
    part.offer = Match(16, wait=True, source="disk")
    world = World(Setup(), parts=(part,))
    world.add(prompt(20), eos=False)
    world.step()
    part.offer = Match()
    world.add(prompt(5, 30), max_tokens=3, eos=False)
    world.step()
    req = world.request("r0")
    assert req.state is RequestState.WAITING_KV and req.slot is None and part.reserved[0] == (4, 16)
    assert len(world.told["r1"].tokens) == 1
    assert world.scheduler.num_waiting == 1
    world.kv.check()
    # What the load would have written:
    chain: list[int] = []
    from tests.simulate.toy import extend

    extend(chain, prompt(20))
    world.worker.memory.write(world.kv.blocks("r0"), 0, chain[:16])
    part.ready = [Readiness("r0", 10)]
    calls = len(part.calls)
    world.step()
    world.step()
    assert "match" not in part.calls[calls:], "it has KV of its own"
    assert world.plans[-1].batch.num_rows == 2 or len(world.told["r0"].tokens) >= 1
    entered = next(row for plan in world.plans for row in plan.batch.new if row.request_id == "r0")
    plan = next(plan for plan in world.plans if entered in plan.batch.new)
    assert plan.batch.num_computed_tokens[plan.batch.slots.tolist().index(entered.slot)] == 10
    world.drain()
    last = world.told["r0"].last
    assert last is not None and last.cached_by_source == {"disk": 10} and last.num_cached_tokens == 10


def test_a_failed_load_may_end_the_request() -> None:
    part = Recorder()
    part.offer = Match(16, wait=True)
    world = World(Setup(), parts=(part,))
    name = world.add(prompt(20))
    world.step()
    part.offer = Match()
    world.add(prompt(3), eos=False)
    world.may_fail.add(name)
    part.ready = [Readiness(name, 0, "the disk is gone")]
    world.step()
    last = world.told[name].last
    assert last is not None and (last.finish, last.error) == (FinishReason.ERROR, "the disk is gone")
    world.drain()


def test_a_part_may_ask_for_patience_without_blocking_anybody() -> None:
    part = Recorder()
    part.offer = Retry()
    world = World(Setup(), parts=(part,))
    world.add(prompt(20), eos=False)
    world.step()
    assert not world.scheduler.has_work(), "nothing to do until somebody acts"
    part.offer = Match()
    world.add(prompt(3), eos=False)
    assert world.scheduler.has_work()
    world.drain()
    assert part.ids[0] == "r0" and part.calls.count("on_arrival") == 2


def test_a_request_parked_on_arrival_starts_when_it_is_ready() -> None:
    """SCH-17."""
    part = Recorder()
    part.state = RequestState.WAITING_GRAMMAR
    world = World(Setup(), parts=(part,))
    name = world.add(prompt(3), eos=False)
    part.state = RequestState.WAITING
    world.add(prompt(3, 5), max_tokens=3, eos=False)
    world.step()
    assert world.request(name).state is RequestState.WAITING_GRAMMAR and world.told["r1"].tokens
    part.ready = [Readiness(name)]
    world.step()
    world.step()
    assert world.told[name].tokens
    world.drain()


def test_idle_parts_still_get_plans_without_rows() -> None:
    """Design 5: an idle engine ticks by its parts' deadlines."""
    part = Recorder()
    world = World(Setup(), parts=(part,))
    assert world.scheduler.schedule() is None and world.scheduler.next_deadline() is None
    part.deadline, part.share = 7.5, Ping()
    assert world.scheduler.next_deadline() == 7.5
    plan = world.scheduler.schedule()
    assert plan is not None and plan.batch.num_rows == 0 and plan.part(Ping) is not None
    outputs = world.applier.apply(plan, world.worker.run(plan))
    assert outputs.deltas == () and outputs.stats is not None


def test_late_parts_are_named_in_the_plan_and_supplied() -> None:
    part = Recorder()
    part.share = Late("Ping")
    world = World(Setup(), parts=(part,))
    world.add(prompt(3))
    plan = world.scheduler.schedule()
    assert plan is not None and plan.late == ("Ping",) and plan.parts == ()
    assert world.scheduler.supply(plan) == (Ping(),)


def test_what_a_part_refuses_on_arrival_leaves_no_trace() -> None:
    class Refuses(Recorder):
        def on_arrival(self, req: Request) -> RequestState:
            raise ClientError("no such grammar")

    first = Recorder()
    world = World(Setup(), parts=(first, Refuses()))
    with pytest.raises(ClientError, match="no such grammar"):
        world.add(prompt(3))
    assert not world.scheduler.ledger.requests and not world.scheduler.has_work()


def test_waiting_requests_do_not_deadlock_over_each_others_blocks() -> None:
    """Two loads hold half the pool each and both need more: one gives way, both end."""
    part = Recorder()
    part.offer = Match(20, wait=True)
    world = World(Setup(num_blocks=12, watermark=0, max_tokens=4), parts=(part,))
    names = [world.add(prompt(21, i * 9), max_tokens=15, eos=False) for i in range(2)]
    world.step()
    part.offer = Match()
    # Neither was loaded; both are woken with nothing there.
    part.ready = [Readiness(name, 0) for name in names]
    part.deadline, part.share = 0.0, Ping()
    world.step()
    part.deadline = part.share = None
    world.drain(300)
    assert all(len(world.told[name].tokens) == 15 for name in names)


@pytest.mark.parametrize("with_part", [False, True])
def test_blocks_a_window_has_passed_wait_for_steps_in_flight_if_a_part_may_refill_them(with_part: bool) -> None:
    """SCH-32: a load does not wait its turn among the steps, so it must not get a block that one still reads."""
    parts = (Recorder(),) if with_part else ()
    world = World(Setup(specs=(full(), window(5)), depth=2, max_tokens=16), parts=parts)
    world.add(prompt(48), max_tokens=2, eos=False)
    world.scheduler.schedule()
    first = world.kv.blocks("r0")[1]
    plan = world.scheduler.schedule()
    assert plan is not None and plan.batch.num_computed_tokens.tolist() == [16]
    kept = [block for block in first if block in world.kv.blocks("r0")[1]]
    assert (kept == list(first)) is with_part


# ---- the loop's questions -------------------------------------------------------------------


def test_aborting_a_waiting_request_is_only_a_delta() -> None:
    world = World(Setup())
    name = world.add(prompt(3))
    world.abort(name)
    assert world.scheduler.has_work(), "the delta has to be told"
    assert world.scheduler.schedule() is None
    outputs = world.step()
    assert outputs is not None and [d.finish for d in outputs.deltas] == [FinishReason.ABORT]
    assert not world.plans and not world.scheduler.has_work()


def test_aborting_unknown_ids_does_nothing() -> None:
    world = World(Setup())
    world.scheduler.abort(["x", "y"])
    assert not world.scheduler.has_work() and world.applier.flush() is None


def test_resetting_the_prefix_cache_works_with_requests_running() -> None:
    """SCH-28."""
    world = World(Setup())
    world.add(prompt(20), max_tokens=10, eos=False)
    world.step()
    assert world.scheduler.reset_prefix_cache()
    name = world.add(prompt(20), max_tokens=2, eos=False)
    world.drain()
    last = world.told[name].last
    assert last is not None and last.num_cached_tokens == 0


def test_stats_tell_what_happened() -> None:
    world = World(Setup())
    for i in range(3):
        world.add(prompt(6, i), max_tokens=4, eos=False)
    world.step()
    stats = world.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.step_rows, stats.step_tokens) == (3, 0, 3, 18)
    assert stats.num_blocks_used == 6 and 0 < stats.kv_usage < 1
    world.drain()
    stats = world.scheduler.stats()
    assert (stats.prompt_tokens, stats.output_tokens, stats.finished) == (18, 12, {"length": 3})
    assert stats.num_blocks_used == 0


def test_the_same_arrivals_give_the_same_plans() -> None:
    """SCH-4: no clock, no randomness."""

    def plans() -> list[object]:
        world = World(Setup(num_blocks=20))
        rng = random.Random(5)
        for i in range(10):
            world.add(prompt(rng.randint(3, 20), i), max_tokens=10, eos=False)
        world.drain()
        return [
            (plan.seq, counts(plan), plan.batch.num_computed_tokens.tolist(), plan.preempted) for plan in world.plans
        ]

    assert plans() == plans()


class Keeper(NullControlPart):
    """Keeps the blocks of the first request that ends, until it is told to let go.

    Owns: whether it lets go, and whether it has.
    """

    name = "keeper"
    lets_go = has_let_go = False

    def on_finish(self, req: Request) -> FinishHold:
        return FinishHold(holds_blocks=req.request_id == "r0")

    def absorb(self, result: StepResult) -> Absorbed:
        if not self.lets_go:
            return Absorbed()
        self.has_let_go = True
        return Absorbed(release=("r0",))

    def next_deadline(self) -> float | None:
        return 0.0

    def plan(self, builder: PlanBuilder) -> PlanPart | None:
        return PlanPart() if self.lets_go and not self.has_let_go and not builder.rows else None


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_request_whose_blocks_are_kept_by_a_part_waits_and_is_not_computed_again_and_again(depth: int) -> None:
    keeper = Keeper()
    world = World(Setup(num_blocks=11, depth=depth, watermark=0), parts=(keeper,))
    world.add(prompt(20), max_tokens=4, eos=False)
    while world.alive:
        world.step()
    world.add(prompt(14, 30), max_tokens=20, eos=False)
    for _ in range(100):
        world.step()
    assert world.alive == ["r1"] and world.scheduler.ledger.counters.preemptions <= 2
    keeper.lets_go = True
    world.drain()
