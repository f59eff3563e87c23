"""Whatever a scheduler does, in any order: no block leaks, none is owned twice, every hit is true (SCH-40)."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.base.kvspec import KVSpec
from tests.kvcache.driver import MAX_LEN, World, full, window

LAYOUTS: dict[str, tuple[int, tuple[KVSpec, ...]]] = {
    "full": (24, (full(),)),
    "window": (24, (window(9),)),
    "full and window": (40, (full(), window(6))),
    "window one token wide": (40, (full(), window(1))),
    "three groups, two block sizes": (64, (full(8), window(10), window(21, 8))),
    "larger blocks only": (20, (full(8), window(5, 12))),
}
BASES = ([1, 2, 3, 4] * 16, [1, 2, 3, 4] * 3 + [0, 3] * 30, [2] * MAX_LEN)


class KVMachine(RuleBasedStateMachine):
    """Hypothesis as the scheduler."""

    @initialize(
        name=st.sampled_from(sorted(LAYOUTS)), watermark=st.integers(0, 3), caching=st.sampled_from([True, True, False])
    )
    def start(self, name: str, watermark: int, caching: bool) -> None:
        num_blocks, specs = LAYOUTS[name]
        self.world = World(num_blocks, specs, watermark=watermark, caching=caching)

    @rule(
        base=st.sampled_from(range(len(BASES))),
        length=st.integers(1, MAX_LEN - 1),
        salt=st.sampled_from([None, None, "s"]),
        reads=st.sampled_from([True, True, True, False]),
    )
    def arrive(self, base: int, length: int, salt: str | None, reads: bool) -> None:
        self.world.arrive(BASES[base][:length], salt, reads)

    @precondition(lambda self: self.world.waiting)
    @rule(chunk=st.integers(1, 12), external=st.sampled_from([0, 0, 4, 7, 30]), cancel=st.booleans())
    def admit(self, chunk: int, external: int, cancel: bool) -> None:
        self.world.admit(chunk, external, cancel)

    @precondition(lambda self: self.world.running)
    @rule(which=st.integers(0, 7), chunk=st.integers(1, 12), lookahead=st.integers(0, 5), cancel=st.booleans())
    def advance(self, which: int, chunk: int, lookahead: int, cancel: bool) -> None:
        if not self.world.advance(which, chunk, lookahead, cancel):
            self.world.leave(len(self.world.running) - 1, fenced=False, preempt=True)

    @rule(
        chunks=st.lists(st.integers(0, 12), max_size=6),
        order=st.lists(st.integers(0, 9), max_size=6),
        admit=st.booleans(),
    )
    def plan(self, chunks: list[int], order: list[int], admit: bool) -> None:
        self.world.plan(chunks, order, admit)

    @precondition(lambda self: self.world.running)
    @rule(which=st.integers(0, 7), back=st.integers(0, 5))
    def commit(self, which: int, back: int) -> None:
        self.world.commit(which, back)

    @precondition(lambda self: self.world.running)
    @rule(which=st.integers(0, 7), fenced=st.booleans(), preempt=st.booleans())
    def leave(self, which: int, fenced: bool, preempt: bool) -> None:
        self.world.leave(which, fenced, preempt)

    @rule()
    def retire(self) -> None:
        self.world.retire()

    @rule()
    def reset(self) -> None:
        self.world.reset()

    @invariant()
    def events_tell_the_truth(self) -> None:
        if hasattr(self, "world"):
            self.world.read_events()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def drive(world: World, rng: random.Random, steps: int) -> None:
    """A seeded scheduler that keeps the pool under pressure."""
    for _ in range(steps):
        action = rng.random()
        if action < 0.12 and len(world.waiting) < 6:
            length = rng.randint(1, MAX_LEN - 1)
            world.arrive(rng.choice(BASES)[:length], rng.choice([None, None, "s"]), rng.random() < 0.9)
        elif action < 0.25:
            world.admit(rng.randint(1, 12), rng.choice([0, 0, 0, 5]), rng.random() < 0.2)
        elif action < 0.70:
            if not world.advance(
                rng.randrange(64), rng.choice([1, 1, 4, 12]), rng.choice([0, 0, 3]), rng.random() < 0.1
            ):
                world.leave(len(world.running) - 1, fenced=rng.random() < 0.3, preempt=True)
        elif action < 0.88:
            world.commit(rng.randrange(64), rng.choice([0, 0, 1, 4]))
        elif action < 0.90:
            order = [rng.randrange(9) for _ in range(rng.choice([0, 5]))]
            world.plan([rng.randint(0, 12) for _ in range(6)], order, rng.random() < 0.5)
        elif action < 0.93:
            world.leave(rng.randrange(64), rng.random() < 0.5, rng.random() < 0.3)
        elif action < 0.998:
            world.retire()
        else:
            world.reset()
        world.read_events()


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_SCH_40_random_scheduling_keeps_every_promise(name: str) -> None:
    num_blocks, specs = LAYOUTS[name]
    world = World(num_blocks, specs, watermark=1)
    drive(world, random.Random(name), 500)
    assert world.admitted and world.cancelled and world.preempted
    assert world.hit_tokens, "the drive never hit the cache, so it proves nothing of it"
    world.finish()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_SCH_40_a_hundred_thousand_steps(name: str) -> None:
    num_blocks, specs = LAYOUTS[name]
    world = World(num_blocks, specs, watermark=2)
    drive(world, random.Random(f"long {name}"), 100_000 // len(LAYOUTS) + 1)
    world.finish()
