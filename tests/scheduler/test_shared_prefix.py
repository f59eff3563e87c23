"""A beginning that many requests share is computed once, although they arrive together."""

from octavo.kvcache.hashing import BlockHash
from octavo.scheduler.shared_prefix import _agreement
from tests.simulate.world import Setup, World

SHARED = tuple(range(16))


def prompts(count: int) -> list[tuple[int, ...]]:
    return [(*SHARED, 20 + i, 30 + i, 40 + i) for i in range(count)]


def test_prompts_that_begin_alike_compute_their_beginning_once() -> None:
    world = World(Setup(max_tokens=12, max_num_seqs=6, num_blocks=80, shared_prefix=8))
    names = [world.add(tokens, max_tokens=3, eos=False) for tokens in prompts(5)]
    world.drain()
    cached = [told.last.num_cached_tokens for told in map(world.told.get, names) if told and told.last]
    assert cached == [0, 16, 16, 16, 16]


def test_short_agreements_wait_for_nobody() -> None:
    world = World(Setup(max_tokens=24, max_num_seqs=6, num_blocks=80, shared_prefix=20))
    for tokens in prompts(3):
        world.add(tokens, max_tokens=3, eos=False)
    world.step()
    assert world.scheduler.num_running > 1
    world.drain()


def test_the_next_one_computes_it_when_the_first_is_aborted() -> None:
    world = World(Setup(max_tokens=6, max_num_seqs=6, num_blocks=80, shared_prefix=8))
    names = [world.add(tokens, max_tokens=3, eos=False) for tokens in prompts(3)]
    world.step()
    assert world.scheduler.num_running == 1
    world.abort(names[0])
    world.drain()
    assert world.told[names[2]].last is not None and world.told[names[2]].last.num_cached_tokens == 16


def test_agreement_ends_at_the_first_difference() -> None:
    a, b, c = (BlockHash(bytes([n])) for n in range(3))
    assert _agreement([a, b, c], [a, b]) == 2
    assert _agreement([a, c], [b, c]) == 0
