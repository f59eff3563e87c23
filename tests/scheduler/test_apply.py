"""What a result does to requests, and that one row's trouble stays its own."""

from typing import Any

import numpy as np
import pytest

from octavo.base.outputs import EngineOutputs, RequestDelta
from octavo.base.step import LogprobArrays, RowError, StepPlan, StepResult, ragged
from octavo.base.types import FinishReason
from tests.simulate.world import Setup, World, full

GREEDY = {"max_tokens": 8, "eos": False}


def prompt(size: int, start: int = 0) -> tuple[int, ...]:
    return tuple((start + i) % 50 for i in range(size))


def answer(world: World, plan: StepPlan | None, tokens: list[list[int]], **more: Any) -> EngineOutputs:
    """Apply a result made by hand."""
    assert plan is not None
    return world.applier.apply(plan, StepResult(seq=plan.seq, tokens=ragged(tokens), **more))


def only(outputs: EngineOutputs) -> RequestDelta:
    (delta,) = outputs.deltas
    return delta


# ---- ends -----------------------------------------------------------------------------------


def test_eos_ends_without_a_stop_reason_and_a_stop_id_with_its_own() -> None:
    for token, reason in ((7, None), (3, 3)):
        world = World(Setup())
        world.add(prompt(4), stop_token_ids=(3,))
        delta = only(answer(world, world.scheduler.schedule(), [[token]]))
        assert (delta.finish, delta.stop_reason, delta.new_token_ids) == (FinishReason.STOP, reason, (token,))


def test_nothing_ends_a_request_before_min_tokens_but_its_length() -> None:
    world = World(Setup())
    world.add(prompt(4), stop_token_ids=(3,), min_tokens=3, max_tokens=8)
    ends = []
    for token in (3, 7, 3, 3):
        plan = world.scheduler.schedule()
        if plan is None:
            break
        ends.append(only(answer(world, plan, [[token]])).finish)
    assert ends == [None, None, FinishReason.STOP]


def test_ignored_eos_does_not_end() -> None:
    world = World(Setup())
    world.add(prompt(4), eos=False)
    assert only(answer(world, world.scheduler.schedule(), [[7]])).finish is None


@pytest.mark.parametrize(("size", "max_tokens", "context", "expected"), [(4, 3, 60, 3), (4, 30, 10, 6), (9, 5, 10, 1)])
def test_length_ends_at_max_tokens_or_at_the_context(size: int, max_tokens: int, context: int, expected: int) -> None:
    world = World(Setup(max_model_len=context))
    name = world.add(prompt(size), max_tokens=max_tokens, eos=False)
    world.drain()
    last = world.told[name].last
    assert last is not None and last.finish is FinishReason.LENGTH and len(world.told[name].tokens) == expected


def test_scoring_alone_ends_when_the_prompt_is_computed() -> None:
    """max_tokens 0: no token is sampled."""
    world = World(Setup(max_tokens=5))
    name = world.add(prompt(12), max_tokens=0, prompt_logprobs=0)
    world.drain()
    told = world.told[name]
    assert told.last is not None and told.last.finish is FinishReason.LENGTH
    assert told.tokens == [] and told.scored == list(range(1, 12))
    assert all(plan.batch.num_sampled_tokens.sum() == 0 for plan in world.plans)
    assert world.scheduler.stats().prompt_tokens == 12


# ---- what a delta carries -------------------------------------------------------------------


def test_times_come_with_the_first_token_and_with_the_end() -> None:
    """REQ-6."""
    world = World(Setup())
    world.add(prompt(4), max_tokens=3, eos=False)
    deltas = [only(outputs) for _ in range(3) if (outputs := world.step())]
    first, second, last = (delta.times for delta in deltas)
    assert first is not None and second is None and last is not None
    assert 0 < first.arrived_s <= first.queued_s <= first.scheduled_s <= first.first_token_s
    assert last.first_token_s == first.first_token_s < last.finished_s and first.finished_s == 0


def test_cached_tokens_are_in_every_delta_and_by_source_in_the_first() -> None:
    world = World(Setup())
    world.add(prompt(20), max_tokens=1, eos=False)
    world.drain()
    world.add(prompt(20), max_tokens=3, eos=False)
    deltas = [only(outputs) for _ in range(3) if (outputs := world.step())]
    assert [delta.num_cached_tokens for delta in deltas] == [16, 16, 16]
    assert deltas[0].cached_by_source == {"device": 16} and deltas[1].cached_by_source is None


def test_logprobs_are_cut_to_each_request_and_to_the_width_it_asked_for() -> None:
    world = World(Setup())
    wide = world.add(prompt(4), logprobs=2)
    none = world.add(prompt(4, 9))
    narrow = world.add(prompt(4, 18), logprobs=0)
    plan = world.scheduler.schedule()
    lines = np.arange(9).reshape(3, 3)
    ids, values = lines.astype(np.int32), -lines.astype(np.float32)
    logprobs = LogprobArrays(ids, values, np.arange(3, dtype=np.int32), np.array([3, 0, 1], dtype=np.int32))
    outputs = answer(world, plan, [[0], [3], [6]], logprobs=logprobs)
    got = {delta.request_id: delta.logprobs for delta in outputs.deltas}
    assert got[none] is None
    first, last = got[wide], got[narrow]
    assert first is not None and first.token_ids.tolist() == [[0, 1, 2]] and first.logprobs.tolist() == [[0, -1, -2]]
    assert last is not None and last.token_ids.tolist() == [[6]] and last.width.tolist() == [1]


def test_prompt_scores_are_delivered_once_although_a_preempted_prompt_is_scored_twice() -> None:
    """SCH-01 (case): no delta is sent twice or lost."""
    world = World(Setup(num_blocks=16, watermark=0, max_tokens=12))
    names = [world.add(prompt(11, i), max_tokens=15, eos=False, prompt_logprobs=0) for i in range(4)]
    world.drain()
    assert world.preempted & set(names)
    assert all(world.told[name].scored == list(range(1, 11)) for name in names)


# ---- trouble --------------------------------------------------------------------------------


def test_a_row_that_failed_in_the_worker_ends_alone() -> None:
    world = World(Setup())
    for i in range(3):
        world.add(prompt(4, i), **GREEDY)
    plan = world.scheduler.schedule()
    outputs = answer(world, plan, [[1], [], [2]], errors=(RowError(1, "no legal token"),))
    by_id = {delta.request_id: delta for delta in outputs.deltas}
    assert (by_id["r1"].finish, by_id["r1"].error) == (FinishReason.ERROR, "no legal token")
    assert by_id["r0"].finish is None and by_id["r2"].new_token_ids == (2,)
    assert world.scheduler.num_running == 2
    world.scheduler.ledger.check()


def test_an_exception_while_a_row_is_handled_ends_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(Setup())
    for i in range(3):
        world.add(prompt(4, i), **GREEDY)
    commit = world.kv.commit

    def broken(req: Any, num_certain_tokens: int) -> Any:
        if req.request_id == "r1":
            raise ValueError("boom")
        return commit(req, num_certain_tokens)

    monkeypatch.setattr(world.kv, "commit", broken)
    world.may_fail.add("r1")
    world.drain()
    last = world.told["r1"].last
    assert last is not None and last.finish is FinishReason.ERROR and "boom" in (last.error or "")
    assert len(world.told["r0"].tokens) == len(world.told["r2"].tokens) == 8


@pytest.mark.parametrize("tokens", [[[]], [[1, 2]]])
def test_a_wrong_number_of_tokens_is_that_rows_error(tokens: list[list[int]]) -> None:
    world = World(Setup())
    world.add(prompt(4))
    delta = only(answer(world, world.scheduler.schedule(), tokens))
    assert delta.finish is FinishReason.ERROR and f"returned {len(tokens[0])} tokens" in (delta.error or "")
    assert world.kv.num_free_blocks == world.kv.num_total_blocks


def test_tokens_for_a_chunk_that_samples_none_are_an_error() -> None:
    world = World(Setup(max_tokens=3))
    world.add(prompt(9))
    delta = only(answer(world, world.scheduler.schedule(), [[5]]))
    assert delta.finish is FinishReason.ERROR and "samples none" in (delta.error or "")


def test_a_result_with_other_rows_than_its_plan_is_the_workers_fault() -> None:
    world = World(Setup())
    world.add(prompt(4))
    with pytest.raises(RuntimeError, match="1 rows, but its result has 2"):
        answer(world, world.scheduler.schedule(), [[1], [2]])


# ---- steps in flight ------------------------------------------------------------------------


def test_what_comes_back_after_the_end_is_dropped_and_blocks_wait_for_it() -> None:
    """SCH-31, SCH-32: EOS is found while the next step is in flight; its blocks go when that step is back."""
    world = World(Setup(depth=2))
    world.add(prompt(4))
    one, two = world.scheduler.schedule(), world.scheduler.schedule()
    assert only(answer(world, one, [[7]])).finish is FinishReason.STOP
    assert world.kv.num_free_blocks < world.kv.num_total_blocks
    assert answer(world, two, [[9]]).deltas == ()
    assert world.kv.num_free_blocks == world.kv.num_total_blocks


def test_an_end_with_nothing_in_flight_gives_its_blocks_back_at_once() -> None:
    world = World(Setup(depth=2))
    world.add(prompt(4), max_tokens=1)
    one = world.scheduler.schedule()
    assert world.scheduler.schedule() is None, "what is in flight ends it"
    answer(world, one, [[9]])
    assert world.kv.num_free_blocks == world.kv.num_total_blocks


def test_an_abort_between_two_results_is_told_first_and_once() -> None:
    world = World(Setup(depth=2))
    for i in range(2):
        world.add(prompt(4, i), **GREEDY)
    one, two = world.scheduler.schedule(), world.scheduler.schedule()
    world.scheduler.abort(["r0"])
    outputs = answer(world, one, [[1], [2]])
    assert [(d.request_id, d.finish) for d in outputs.deltas] == [("r0", FinishReason.ABORT), ("r1", None)]
    assert [d.request_id for d in answer(world, two, [[3], [4]]).deltas] == ["r1"]
    world.scheduler.ledger.check()


# ---- drafts ---------------------------------------------------------------------------------


def test_accepted_drafts_count_and_rejected_ones_are_computed_again() -> None:
    """SCH-25: blocks that hold rejected drafts do not become findable."""
    world = World(Setup(specs=(full(4),)))
    name = world.add(prompt(2), max_tokens=20, eos=False)
    answer(world, world.scheduler.schedule(), [[10]], drafts=ragged([[11, 12, 13]]))
    plan = world.scheduler.schedule()
    assert plan is not None and (
        plan.batch.num_scheduled_tokens[0],
        plan.batch.num_draft_tokens[0],
        plan.batch.num_computed_tokens[0],
    ) == (4, 3, 2)
    assert world.request(name).num_drafts == 0 and world.request(name).num_computed_tokens == 6
    assert world.scheduler.schedule() is None, "nothing more is known of it while drafts are being verified"
    delta = only(answer(world, plan, [[11, 30]], drafts=ragged([[]])))
    req = world.request(name)
    assert delta.new_token_ids == (11, 30) and list(req.output_tokens) == [10, 11, 30]
    assert (req.num_computed_tokens, req.num_tokens, req.num_placeholders) == (4, 5, 0)
    assert world.kv.stats().num_cached_blocks == 1
    req.check()


def test_tokens_after_a_stop_among_accepted_drafts_are_dropped() -> None:
    world = World(Setup())
    world.add(prompt(2), max_tokens=20)
    answer(world, world.scheduler.schedule(), [[10]], drafts=ragged([[7, 12, 13]]))
    delta = only(answer(world, world.scheduler.schedule(), [[7, 12, 13, 14]], drafts=ragged([[]])))
    assert delta.new_token_ids == (7,) and delta.finish is FinishReason.STOP


def test_a_rejected_drafts_block_is_not_findable_before_it_is_computed_again() -> None:
    """SCH-25: the block is full of known tokens, but its last KV came from a wrong guess."""
    world = World(Setup(specs=(full(4),)))
    world.add(prompt(2), max_tokens=20, eos=False)
    answer(world, world.scheduler.schedule(), [[10]], drafts=ragged([[11]]))
    answer(world, world.scheduler.schedule(), [[30]], drafts=ragged([[]]))
    assert world.request("r0").num_tokens == 4 and world.kv.stats().num_cached_blocks == 0
    answer(world, world.scheduler.schedule(), [[31]], drafts=ragged([[]]))
    assert world.kv.stats().num_cached_blocks == 1


def test_drafts_never_reach_beyond_the_length_that_is_wanted() -> None:
    world = World(Setup())
    world.add(prompt(2), max_tokens=3, eos=False)
    answer(world, world.scheduler.schedule(), [[10]], drafts=ragged([[11, 12, 13]]))
    plan = world.scheduler.schedule()
    assert plan is not None and plan.batch.num_draft_tokens.tolist() == [1]


# ---- the fast way and the slow way ----------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_hot_path_gives_what_the_general_path_gives(rows: int, depth: int) -> None:
    """Rows that ask for logprobs take the general way through `apply`; tokens and ends are the same."""
    heard = []
    for logprobs in (None, 0):
        world = World(Setup(depth=depth, max_num_seqs=rows, max_num_active_seqs=rows))
        for i in range(rows):
            extra = {} if logprobs is None else {"logprobs": logprobs}
            world.add(prompt(5 + i, i), max_tokens=13, stop_token_ids=(5, 6), **extra)
        deltas = []
        while world.alive:
            outputs = world.step()
            deltas += [
                (d.request_id, d.new_token_ids, d.finish, d.stop_reason) for d in (outputs.deltas if outputs else ())
            ]
        heard.append(deltas)
    assert heard[0] == heard[1]


def test_the_prompt_of_several_answers_is_counted_once() -> None:
    """F22: figures say what usage says: one prompt, whatever `n` is; the siblings' hits are theirs, not the cache's."""
    world = World(Setup(max_tokens=10))
    for i in range(3):
        world.add(tuple(range(20)), parent_id="p", sample_index=i, max_tokens=4, eos=False)
    world.drain()
    stats = world.scheduler.stats()
    assert stats.prompt_tokens == 20
    assert (stats.prefix_queries, stats.prefix_hits, stats.prefix_shared) == (20, 0, 32)
    world.add((*range(20), 1), max_tokens=1)
    world.drain()
    stats = world.scheduler.stats()
    assert (stats.prompt_tokens, stats.prefix_queries, stats.prefix_hits) == (41, 41, 20)


def test_what_a_preempted_request_finds_again_is_no_hit() -> None:
    """F23: two prompts that share nothing have no hits, also when one of them has to start again."""
    world = World(Setup(num_blocks=14, max_num_seqs=2, max_tokens=40, watermark=0))
    for i in range(2):
        world.add(tuple(range(30 * i, 30 * i + 20)), max_tokens=12, eos=False)
    world.drain()
    stats = world.scheduler.stats()
    assert stats.preemptions == 1
    assert (stats.prefix_queries, stats.prefix_hits) == (40, 0)
    assert stats.prefix_resumed > 0
