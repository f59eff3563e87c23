"""The copy of what the prefix cache holds, and those who follow it (SCH-27)."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import NotFoundError
from octavo.base.outputs import CacheChanges, EngineOutputs
from octavo.kvcache.published import Scheme
from octavo.serving.async_engine import AsyncEngine
from octavo.serving.cache_feed import CacheFeed, NoFeed
from tests.support.toy_engine import ToyClient, scripted
from tests.support.toy_front import TEXT, info, limits

SCHEME = Scheme(hash="sha256", hash_block_size=16, block_size=16)
A, B, C = (bytes([i]) * 32 for i in range(3))


def stored(*hashes: bytes) -> CacheChanges:
    return CacheChanges(stored=hashes)


def test_a_follower_gets_what_is_there_and_then_every_change_in_order() -> None:
    async def test() -> None:
        feed = CacheFeed(SCHEME)
        feed.absorb(stored(A, B))
        follower = feed.follow()
        assert follower.snapshot == (A, B)
        changes = [CacheChanges(removed=(A,)), CacheChanges(cleared=True, stored=(C,))]
        for change in changes:
            feed.absorb(change)
        assert [await follower.next(), await follower.next()] == changes
        assert len(feed) == 1 and feed.follow().snapshot == (C,)

    asyncio.run(test())


def test_a_follower_waits_for_news_and_may_stop_waiting() -> None:
    async def test() -> None:
        feed = CacheFeed(SCHEME)
        follower = feed.follow()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await follower.next()
        waiting = asyncio.ensure_future(follower.next())
        await asyncio.sleep(0)
        feed.absorb(stored(A))
        assert await waiting == stored(A)

    asyncio.run(test())


def test_one_who_is_too_slow_is_cut_off_and_others_are_not() -> None:
    async def test() -> None:
        feed = CacheFeed(SCHEME, limit=10)
        slow, quick = feed.follow(), feed.follow()
        for number in range(9):
            feed.absorb(stored(bytes([number])))
            assert await quick.next() == stored(bytes([number]))
        assert slow.lagging.is_set() and not quick.lagging.is_set()
        assert await slow.next() is None
        assert len(feed.follow().snapshot) == 9

    asyncio.run(test())


def test_everybody_is_told_when_the_engine_is_gone_and_nobody_waits_after_that() -> None:
    async def test() -> None:
        feed = CacheFeed(SCHEME)
        before = feed.follow()
        feed.absorb(stored(A))
        feed.close()
        assert await before.next() == stored(A)
        assert await before.next() is None
        assert await feed.follow().next() is None

    asyncio.run(test())


def test_two_starts_have_two_epochs() -> None:
    assert CacheFeed(SCHEME).epoch != CacheFeed(SCHEME).epoch


def test_without_the_option_followers_are_told_its_name() -> None:
    with pytest.raises(NotFoundError, match="--kv-events"):
        NoFeed().follow()


@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9))), max_size=20))
def test_the_copy_is_what_the_changes_make(changes: list[tuple[bool, set[int], set[int]]]) -> None:
    async def test() -> None:
        feed, truth = CacheFeed(SCHEME), set[bytes]()
        for cleared, removed, came in changes:
            gone, new = ({bytes([i]) for i in each} for each in (removed - came, came))
            truth = ((set() if cleared else truth) - gone) | new
            feed.absorb(CacheChanges(cleared=cleared, removed=tuple(gone), stored=tuple(new)))
            assert set(feed.follow().snapshot) == truth and len(feed) == len(truth)

    asyncio.run(test())


def test_what_an_engine_says_of_its_cache_reaches_the_feed_and_its_death_too() -> None:
    async def test() -> None:
        client = ToyClient(scripted([7], 7), manual=True)
        feed = CacheFeed(SCHEME)
        engine = AsyncEngine(client, TEXT, limits(), info(), feed=feed)
        await engine.start()
        follower = feed.follow()
        client._on_outputs(EngineOutputs(cache=stored(A)))
        async with asyncio.timeout(5):
            assert await follower.next() == stored(A)
            await engine.stop()
            assert await follower.next() is None

    asyncio.run(test())
