"""A plan being written is a transaction: `drop` restores everything bit for bit."""

import random
from typing import Any

import pytest

from octavo.base.types import RequestState
from octavo.kvcache.manager import KVCacheManager
from octavo.scheduler.plan_builder import PlanBuilder, TokenBudget
from octavo.scheduler.request import Request
from tests.scheduler.test_request import make
from tests.simulate.world import full, make_layout, window


class Counting:
    """A constraint that counts tokens per request.

    Owns: the counts.
    """

    rank = 0
    limits_decode = True

    def __init__(self) -> None:
        self.taken: dict[Request, int] = {}

    def applies(self, req: Request) -> bool:
        return True

    def wait(self, req: Request) -> None:
        return None

    def crowd(self, req: Request) -> None:
        return None

    def admits(self, req: Request, builder: PlanBuilder) -> bool:
        return True

    def cap(self, req: Request, n: int, builder: PlanBuilder) -> int:
        return n

    def commit(self, req: Request, n: int, builder: PlanBuilder) -> None:
        self.taken[req] = n

    def undo(self, req: Request, builder: PlanBuilder) -> None:
        del self.taken[req]

    def forget(self, req: Request) -> None:
        return None


def manager(num_blocks: int = 200) -> KVCacheManager:
    return KVCacheManager(
        make_layout((full(), window(6)), num_blocks),
        hasher_block_size=4,
        enable_prefix_caching=True,
        watermark_blocks=0,
        max_model_len=100,
        max_batched_tokens=64,
    )


def picture(builder: PlanBuilder, kv: KVCacheManager, rule: Counting, requests: list[Request]) -> Any:
    """Everything that a row can take from."""
    budget = builder.budget
    return (
        list(builder.rows),
        list(builder.num_computed_tokens),
        {req: (take.row, take.count, take.sample) for req, take in builder.takes.items()},
        (budget.left, budget.spare, budget.prompts),
        kv.stats(),
        [kv.blocks(req.request_id) for req in requests],
        dict(rule.taken),
        [
            (r.num_computed_tokens, r.num_placeholders, r.num_drafts, r.num_reserved_tokens, r.holds_blocks)
            for r in requests
        ],
    )


def crowd(count: int) -> list[Request]:
    requests = []
    for i in range(count):
        requests.append(make(tuple(range(i, i + 3 + i % 7)), name=f"r{i}", max_tokens=40))
    return requests


@pytest.mark.parametrize("seed", range(6))
def test_drop_gives_back_exactly_what_the_row_took(seed: int) -> None:
    """SCH-12: rows of every kind are added and dropped in any order; the builder is as if they had never been."""
    rng = random.Random(seed)
    kv, rule, requests = manager(), Counting(), crowd(12)
    first = PlanBuilder(1, TokenBudget(300, 310, prefill_chunk=300, prompts=300), kv)
    for req in requests[:6]:  # these decode
        assert first.try_add(req, req.num_tokens, in_prompt=True, hit=kv.match(req), admission=True)
        req.leave_prompt()
        req.accept(rng.randrange(9))
        req.propose(rng.choice((0, 0, 2)))
    builder = PlanBuilder(2, TokenBudget(40, 42, prefill_chunk=40, prompts=40), kv)
    empty = picture(builder, kv, rule, requests)
    added: list[Request] = []
    for req in rng.sample(requests, 12):
        add(builder, kv, rule, req)
        added.append(req)
        if rng.random() < 0.5:
            before = picture(builder, kv, rule, requests)
            more = next((r for r in requests if r not in added), None)
            if more is not None:
                add(builder, kv, rule, more)
                builder.drop(more)
                assert picture(builder, kv, rule, requests) == before
    for req in reversed(added):
        builder.drop(req)
    assert picture(builder, kv, rule, requests) == empty
    kv.check()


def run(req: Request, slot: int) -> None:
    req.move(RequestState.WAITING)
    req.run(slot, 1, 0.0)


def add(builder: PlanBuilder, kv: KVCacheManager, rule: Counting, req: Request) -> None:
    if not req.holds_blocks:
        assert builder.try_add(req, 2, in_prompt=True, constraints=(rule,), hit=kv.match(req), admission=True)
    elif req.num_pending_tokens == 1 and req.num_computed_tokens < req.num_reserved_tokens:
        assert builder.add_decode(req)
    else:
        assert builder.try_add(req, req.num_pending_tokens, constraints=(rule,))


def test_a_row_dropped_from_the_middle_leaves_the_others_in_place() -> None:
    kv, rule, requests = manager(), Counting(), crowd(5)
    builder = PlanBuilder(1, TokenBudget(64, 64, prefill_chunk=64, prompts=64), kv)
    for req in requests:
        add(builder, kv, rule, req)
    builder.drop(requests[1])
    builder.drop(requests[1])  # not a row any more: nothing happens
    for slot, req in enumerate(requests):
        run(req, slot)
    assert [take.row for take in builder.takes.values()] == [0, 1, 2, 3]
    plan = builder.seal(
        slots=builder_slots(builder),
        finished=(),
        preempted=(),
        parts=(),
        late=(),
        num_groups=2,
    )
    assert plan.batch.slots.tolist() == [0, 2, 3, 4] and plan.batch.num_scheduled_tokens.tolist() == [2] * 4
    for row, slot in enumerate(plan.batch.slots):
        blocks = kv.blocks(f"r{slot}")
        assert [tuple(plan.batch.new_blocks[g].row(row).tolist()) for g in range(2)] == list(blocks)


def builder_slots(builder: PlanBuilder) -> Any:
    from octavo.base.step import as_ints

    return as_ints([req.slot for req in builder.rows])


def test_nothing_is_taken_when_there_are_no_blocks() -> None:
    kv, rule = manager(3), Counting()
    req = make(tuple(range(20)))
    builder = PlanBuilder(1, TokenBudget(64, 64, prefill_chunk=64, prompts=64), kv)
    before = picture(builder, kv, rule, [req])
    assert not builder.try_add(req, 20, in_prompt=True, constraints=(rule,), hit=kv.match(req), admission=True)
    assert picture(builder, kv, rule, [req]) == before


def test_drafts_take_from_the_spare_room_before_they_take_from_what_may_be_scheduled() -> None:
    """SCH-3: 10 may be scheduled, 13 are in the batch at most."""
    budget = TokenBudget(10, 13, prefill_chunk=10, prompts=10)
    assert budget.cap(20, 3, False) == 13 and budget.cap(5, 4, False) == 5
    budget.left, budget.spare = 1, 0
    assert budget.cap(4, 3, False) == 1
    budget.left, budget.spare = 0, 2
    assert budget.cap(3, 2, False) == 0  # drafts alone are no row


def test_prompt_chunks_are_cut_to_the_share_and_leave_room_for_those_who_decode() -> None:
    budget = TokenBudget(10, 10, prefill_chunk=4, prompts=6)
    assert budget.cap(9, 0, True) == 4 and budget.cap(3, 0, True) == 3
    budget.prompts = 2
    assert budget.cap(9, 0, True) == 2 and budget.cap(1, 0, False) == 1
    budget.prompts = -1
    assert budget.cap(9, 0, True) == 0


def test_plan_arrays_cannot_be_written() -> None:
    kv, rule, requests = manager(), Counting(), crowd(2)
    builder = PlanBuilder(1, TokenBudget(64, 64, prefill_chunk=64, prompts=64), kv)
    for slot, req in enumerate(requests):
        add(builder, kv, rule, req)
        run(req, slot)
    plan = builder.seal(
        slots=builder_slots(builder),
        finished=(),
        preempted=(),
        parts=(),
        late=(),
        num_groups=2,
    )
    for array in (
        plan.batch.num_computed_tokens,
        plan.batch.num_scheduled_tokens,
        plan.batch.num_sampled_tokens,
        plan.batch.new_blocks[0].values,
    ):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5
