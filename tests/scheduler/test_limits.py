"""The fair share, and samples that wait for each other."""

from hypothesis import given
from hypothesis import strategies as st

from octavo.scheduler.limits import SchedulerLimits, SharedPrompt, fair_prefill_chunk
from tests.simulate.world import Setup, World


def limits(threshold: int = 0, tokens: int = 64) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=8,
        max_num_active_seqs=3,
        max_num_scheduled_tokens=tokens,
        max_num_batched_tokens=tokens,
        max_model_len=100,
        long_prefill_token_threshold=threshold,
    )


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=20), st.integers(0, 3000))
def test_the_fair_chunk_is_the_largest_that_everybody_may_take(needs: list[int], tokens: int) -> None:
    """SCH-11."""
    prefill_chunk = fair_prefill_chunk(needs, tokens)
    assert sum(min(need, prefill_chunk) for need in needs) <= tokens or sum(needs) <= tokens
    if sum(needs) > tokens:
        assert sum(min(need, prefill_chunk + 1) for need in needs) > tokens
    else:
        assert prefill_chunk >= max(needs)


def test_a_short_need_is_met_and_the_long_one_gets_the_rest() -> None:
    assert fair_prefill_chunk([1900, 10], 60) == 50
    assert fair_prefill_chunk([1900], 60) == 60
    assert fair_prefill_chunk([10, 10], 0) == 0
    assert fair_prefill_chunk([10], -3) == 0


def test_the_least_chunk_is_the_threshold_or_an_eighth_of_the_step() -> None:
    assert (
        limits().min_prefill_chunk == 8
        and limits(threshold=20).min_prefill_chunk == 20
        and limits(tokens=4).min_prefill_chunk == 1
    )
    assert limits().max_running == 3


PROMPT = tuple(range(20))


def test_samples_of_one_prompt_compute_it_once() -> None:
    """OUT-7: the first computes, the others hit all full blocks of it."""
    world = World(Setup(max_tokens=10))
    names = [world.add(PROMPT, parent_id="p", sample_index=i, max_tokens=4, eos=False) for i in range(3)]
    while len(world.scheduler.ledger.requests) == 3 and world.scheduler.num_running < 3:
        world.step()
        assert world.scheduler.num_running in (1, 3)
    world.drain()
    cached = [told.last.num_cached_tokens for told in map(world.told.get, names) if told and told.last]
    assert cached == [0, 16, 16]


def test_the_next_sample_takes_over_when_the_first_is_aborted() -> None:
    world = World(Setup(max_tokens=10))
    names = [world.add(PROMPT, parent_id="p", sample_index=i, eos=False) for i in range(3)]
    world.step()
    world.abort(names[0])
    world.drain()
    assert world.told[names[1]].tokens == world.told[names[2]].tokens != []


def test_strangers_do_not_wait_for_a_family() -> None:
    world = World(Setup(max_tokens=10))
    for i in range(2):
        world.add(PROMPT, parent_id="p", sample_index=i)
    other = world.add((1, 2), eos=False)
    world.step()
    assert world.told[other].tokens != []
    world.drain()


def test_families_are_forgotten_with_their_last_member() -> None:
    world = World(Setup())
    names = [world.add(PROMPT, parent_id="p", sample_index=i) for i in range(2)]
    rule = world.request(names[0]).constraints[0]
    world.drain()
    assert vars(rule) == {"_families": {}}


def test_without_a_prefix_cache_samples_do_not_wait() -> None:
    world = World(Setup(prefix_caching=False, max_tokens=60))
    for i in range(3):
        world.add(PROMPT, parent_id="p", sample_index=i)
    world.step()
    assert world.scheduler.num_running == 3
    world.drain()


def test_held_back_samples_have_no_share_of_a_step() -> None:
    """F40, SCH-11: a long prompt with n = 4 gets every step whole, not a quarter of some."""
    world = World(Setup(max_tokens=16, num_blocks=200, max_model_len=200))
    for i in range(4):
        world.add(tuple(range(100)), parent_id="p", sample_index=i, max_tokens=2, eos=False)
    for _ in range(6):
        world.step()
    assert [plan.batch.num_tokens for plan in world.plans[:6]] == [16] * 6
    world.drain()


def test_those_who_wait_for_a_shared_beginning_have_no_share_either() -> None:
    """F40: of prompts that begin alike one computes the beginning; when it is cached, all have their share."""
    world = World(Setup(max_tokens=16, num_blocks=300, max_model_len=200, shared_prefix=12))
    beginning = tuple(range(80))
    for i in range(5):
        world.add((*beginning, *range(100 + 20 * i, 100 + 20 * i + 20)), max_tokens=2, eos=False)
    for _ in range(5):
        world.step()
    assert [plan.batch.num_tokens for plan in world.plans[:5]] == [16] * 5
    assert world.scheduler.num_running == 1
    while world.scheduler.num_running == 1:
        world.step()
    assert world.scheduler.num_running > 2
    world.drain()


def test_a_look_costs_what_it_finds() -> None:
    """F40: thousands who are held are asked together, by what they wait for, and not one by one."""
    world = World(Setup(max_tokens=16, num_blocks=20_000, max_model_len=400, max_num_seqs=4, max_num_active_seqs=4))
    for i in range(500):
        world.add(tuple(range(300)), parent_id="p", sample_index=i, max_tokens=1, eos=False)
    world.step()  # everybody is looked at once
    asked = []
    rule = next(rule for rule in world.request("r0").constraints if isinstance(rule, SharedPrompt))
    wait = rule.wait
    rule.wait = lambda req: asked.append(req) or wait(req)  # type: ignore[method-assign]
    for _ in range(10):
        world.step()
    assert len(asked) <= 20, len(asked)
    assert world.scheduler.num_waiting == 499
