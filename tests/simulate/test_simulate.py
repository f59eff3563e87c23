"""Random lives of a whole scheduler: nothing leaks, nobody starves, everybody gets what he would get alone (SCH-40)."""

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.simulate.toy import EOS, Broken, Memory
from tests.simulate.world import PREFIXES, Setup, World, full, make_layout, random_step, window

SETUPS = {
    "roomy": Setup(),
    "tight": Setup(num_blocks=18, watermark=0),
    "tight, two steps in flight": Setup(num_blocks=18, watermark=0, depth=2),
    "three steps in flight": Setup(num_blocks=22, depth=3),
    "priorities": Setup(num_blocks=20, policy="priority", aging_s=0.5, depth=2),
    "sliding window": Setup(specs=(full(), window(9)), num_blocks=36, depth=2),
    "blocks of two sizes": Setup(specs=(full(8), window(5)), num_blocks=36, depth=2),
    "no prefix cache": Setup(prefix_caching=False, num_blocks=20, depth=2),
    "fewer active than slots": Setup(max_num_active_seqs=2, threshold=5),
    "few tokens a step": Setup(max_tokens=5, num_blocks=24, depth=2),
    "drafts": Setup(draft_len=3, spare=6, num_blocks=24),
    "drafts, two steps in flight": Setup(draft_len=3, num_blocks=24, depth=2),
    "scripted part": Setup(scripted=True, num_blocks=30),
    "scripted part, two steps in flight": Setup(scripted=True, num_blocks=22, depth=2),
    "scripted part, three steps in flight": Setup(scripted=True, num_blocks=22, depth=3),
    "scripted part, priorities": Setup(scripted=True, num_blocks=20, depth=2, policy="priority", aging_s=0.3),
    "scripted part, windows": Setup(scripted=True, specs=(full(), window(9, 8)), num_blocks=40, depth=2),
    "scripted part, drafts": Setup(scripted=True, num_blocks=24, depth=2, draft_len=2, spare=4),
}


def live(setup: Setup, steps: int) -> World:
    """A random life, to its end."""
    world = World(setup)
    rng = random.Random(setup.seed + 1)
    for _ in range(steps):
        random_step(world, rng)
        oldest = min((told.added_at for i, told in world.told.items() if told.last is None), default=world.steps)
        if world.steps - oldest > 1500:
            raise Broken(f"somebody has waited for {world.steps - oldest} steps")
    world.scheduler.resume()
    world.drain()
    return world


@pytest.mark.parametrize("name", SETUPS)
def test_random_lives_end_as_if_each_request_were_alone(name: str) -> None:
    """SCH-40, SCH-30..32: the toy worker checks every block it reads, the driver every answer."""
    for seed in (1, 2):
        world = live(replace(SETUPS[name], seed=seed), 250)
        assert len(world.told) > 40
        if name.startswith(("tight", "no prefix", "priorities")):
            assert world.preempted, "the pool was meant to be too small"
        if world.part is not None:
            hooks = {"on_arrival", "match", "after_reserve", "plan", "on_commit", "on_finish", "absorb"}
            assert hooks <= world.part.calls.keys()
            assert world.part.calls["on_arrival"] == world.part.calls["on_finish"] == len(world.told)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_one_hundred_thousand_steps() -> None:
    """SCH-40, in full."""
    steps = 0
    for seed in range(10_000):
        for setup in SETUPS.values():
            steps += live(replace(setup, seed=100 + seed), 1000).steps
            if steps >= 100_000:
                return


class Life(RuleBasedStateMachine):
    """Hypothesis as the clients and the clock."""

    @initialize(name=st.sampled_from(sorted(SETUPS)), seed=st.integers(0, 3))
    def start(self, name: str, seed: int) -> None:
        self.world = World(replace(SETUPS[name], seed=seed))

    @rule(
        prefix=st.sampled_from(PREFIXES),
        shared=st.integers(0, 30),
        tail=st.lists(st.integers(0, 49), min_size=1, max_size=10),
        max_tokens=st.integers(1, 20),
        samples=st.sampled_from([1, 1, 1, 3]),
        priority=st.integers(0, 2),
    )
    def arrive(
        self, prefix: tuple[int, ...], shared: int, tail: list[int], max_tokens: int, samples: int, priority: int
    ) -> None:
        if len(self.world.alive) > 12:
            return
        parent = f"p{len(self.world.told)}" if samples > 1 else None
        for i in range(samples):
            self.world.add(
                prefix[:shared] + tuple(tail),
                parent_id=parent,
                sample_index=i,
                priority=priority,
                max_tokens=max_tokens,
            )

    @rule(which=st.integers(0, 20))
    def abort(self, which: int) -> None:
        alive = self.world.alive
        if alive:
            self.world.abort(alive[which % len(alive)])

    @rule(seconds=st.floats(0.0, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.world.clock.now += seconds

    @rule()
    def forget_the_cache(self) -> None:
        self.world.scheduler.reset_prefix_cache()

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "world"):
            self.world.scheduler.ledger.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


class TestLife(Life.TestCase):  # type: ignore[name-defined,misc]
    """SCH-40 with shrinking."""

    settings = settings(
        max_examples=40,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )


def test_results_do_not_depend_on_the_number_of_steps_in_flight() -> None:
    """SCH-31: depth changes when tokens come, not which."""
    answers = []
    for depth in (1, 2, 3):
        world = World(replace(SETUPS["tight"], depth=depth))
        for i in range(8):
            world.add(PREFIXES[i % 3][: 5 + 3 * i], max_tokens=12, eos=False)
        world.drain()
        answers.append({i: told.tokens for i, told in world.told.items()})
    assert answers[0] == answers[1] == answers[2]


def test_the_toy_worker_sees_a_block_with_other_content() -> None:
    """The checker itself can fail."""
    memory = Memory(make_layout((full(),), 4))
    memory.write([[1, 2]], 0, [11, 12, 13, 14, 15])
    memory.verify([[1, 2]], [11, 12, 13, 14, 15], 5)
    memory.write([[2]], 0, [99])
    with pytest.raises(Broken, match="holds other content"):
        memory.verify([[1, 2]], [11, 12, 13, 14, 15], 5)


def test_nobody_waits_longer_than_those_before_it_need_under_fcfs() -> None:
    """SCH-40: with more work than fits, first tokens come in order of arrival."""
    world = World(Setup(num_blocks=14, watermark=0, max_num_seqs=3, max_num_active_seqs=3))
    names = [world.add(tuple((i + j) % 50 for j in range(12)), max_tokens=8, eos=False) for i in range(12)]
    world.drain()
    first = [world.told[name].first for name in names]
    times = [delta.times.scheduled_s for delta in first if delta is not None and delta.times is not None]
    assert len(times) == 12 and times == sorted(times)


def test_eos_is_among_what_the_toy_says() -> None:
    """Lives end by STOP too, or the stop check is not exercised."""
    world = live(Setup(seed=3), 250)
    reasons = {told.last.finish for told in world.told.values() if told.last is not None}
    assert {"stop", "length", "abort", "error"} <= {reason.value for reason in reasons if reason is not None}
    assert any(EOS in told.tokens for told in world.told.values())
