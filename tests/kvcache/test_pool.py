"""The block pool against a plain list, and its undo against a copy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.kvcache.pool import BlockPool, Taken


def test_SCH_22_plain_blocks_come_first_then_virgin_then_kept() -> None:
    pool = BlockPool(8)
    assert pool.take(4).blocks == (1, 2, 3, 4)
    pool.release(2, keep=True)
    pool.release(1, keep=True)
    pool.release(3, keep=False)
    pool.release(4, keep=False)
    assert pool.free_order() == (4, 3, 5, 6, 7, 2, 1)
    taken = pool.take(6)
    assert taken == Taken((4, 3, 5, 6, 7, 2), 2, 3)
    assert taken.evicted == (2,)
    pool.check()


def test_SCH_23_holding_takes_a_block_out_of_the_middle() -> None:
    pool = BlockPool(6)
    pool.take(5)
    for block in (1, 2, 3, 4, 5):
        pool.release(block, keep=True)
    pool.hold(3)
    assert pool.kept() == (1, 2, 4, 5)
    pool.hold(3)
    assert pool.holders(3) == 2
    pool.release(3, keep=True)
    assert not pool.is_free(3)
    pool.release(3, keep=True)
    assert pool.kept() == (1, 2, 4, 5, 3)
    pool.check()


def test_memory_is_touched_in_order_and_only_when_needed() -> None:
    pool = BlockPool(100)
    for _ in range(20):
        block = pool.take(1).blocks[0]
        assert block == 1
        pool.release(block, keep=False)
    assert pool.take(3).blocks == (1, 2, 3)


def test_giving_back_twice_or_taking_too_much_is_our_own_mistake() -> None:
    pool = BlockPool(3)
    with pytest.raises(RuntimeError, match="3 blocks were asked of a pool with 2"):
        pool.take(3)
    pool.take(1)
    pool.release(1, keep=False)
    with pytest.raises(RuntimeError, match="does not hold"):
        pool.release(1, keep=False)
    with pytest.raises(RuntimeError):
        pool.release(0, keep=False)


def test_undo_in_another_order_loses_nothing() -> None:
    pool = BlockPool(10)
    first, second = pool.take(3), pool.take(3)
    pool.untake(first, ())
    pool.check()
    assert pool.plain() == (1, 2, 3)
    pool.untake(second, ())
    pool.check()
    assert sorted(pool.free_order()) == list(range(1, 10))


def test_a_held_block_whose_neighbours_left_goes_back_where_it_is_evictable() -> None:
    pool = BlockPool(5)
    pool.take(4)
    for block in (1, 2, 3, 4):
        pool.release(block, keep=True)
    middle = pool.hold(2)
    pool.hold(1)
    pool.unhold(middle, keep=True)
    assert pool.kept() == (2, 3, 4)
    last = pool.hold(3)
    pool.hold(2)
    pool.hold(4)
    pool.unhold(last, keep=True)
    assert pool.kept() == (3,)
    pool.check()


def test_forgetting_makes_kept_blocks_the_last_of_the_plain() -> None:
    pool = BlockPool(6)
    pool.take(4)
    pool.forget()
    for block, keep in ((1, True), (2, False), (3, True)):
        pool.release(block, keep)
    pool.forget()
    pool.check()
    assert pool.free_order() == (2, 1, 3, 5)
    pool.release(4, keep=False)
    assert pool.free_order() == (4, 2, 1, 3, 5)


class SlowPool:
    """The same promises with plain lists."""

    def __init__(self, num_blocks: int) -> None:
        self.plain: list[int] = []
        self.virgin = list(range(1, num_blocks))
        self.kept: list[int] = []
        self.holders: dict[int, int] = {}

    def free_order(self) -> tuple[int, ...]:
        return (*self.plain, *self.virgin, *self.kept)

    def take(self, count: int) -> tuple[int, ...]:
        out = []
        for _ in range(count):
            source = self.plain or self.virgin or self.kept
            out.append(source.pop(0))
            self.holders[out[-1]] = 1
        return tuple(out)

    def hold(self, block: int) -> None:
        if block in self.kept:
            self.kept.remove(block)
        self.holders[block] = self.holders.get(block, 0) + 1

    def release(self, block: int, keep: bool) -> None:
        self.holders[block] -= 1
        if not self.holders[block]:
            del self.holders[block]
            self.kept.append(block) if keep else self.plain.insert(0, block)


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "hold", "release", "undo"]), st.integers(0, 9), st.booleans()), max_size=60
    )
)
def test_the_pool_does_what_a_list_does(ops: list[tuple[str, int, bool]]) -> None:
    pool, slow = BlockPool(10), SlowPool(10)
    content: set[int] = set()  # blocks with findable content
    for op, n, keep in ops:
        if op == "take":
            count = min(n, pool.num_free)
            taken = pool.take(count)
            assert taken.blocks == slow.take(count)
            content.difference_update(taken.evicted)
        elif op == "hold" and content:
            block = sorted(content)[n % len(content)]
            pool.hold(block)
            slow.hold(block)
        elif op == "release" and slow.holders:
            block = sorted(slow.holders)[n % len(slow.holders)]
            if keep:
                content.add(block)
            pool.release(block, block in content)
            slow.release(block, block in content)
        elif op == "undo":
            before = pool.free_order()
            held = [pool.hold(b) for b in sorted(content)[:n]]
            taken = pool.take(min(n, pool.num_free))
            pool.untake(taken, taken.evicted)
            for one in reversed(held):
                pool.unhold(one, keep=True)
            assert pool.free_order() == before
        pool.check()
        assert pool.free_order() == slow.free_order()
        assert pool.num_free == len(slow.free_order())
