"""The prefix index: duplicates are kept, and followers of the events know what can be found."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.kvcache.hashing import BlockHash, group_key
from octavo.kvcache.prefix import CacheEvent, EventLog, NoEvents, PrefixIndex

A, B = BlockHash(b"a" * 32), BlockHash(b"b" * 32)


def test_SCH_21_a_key_finds_a_block_as_long_as_one_carries_it() -> None:
    index = PrefixIndex(NoEvents())
    for block in (5, 3, 9):
        index.add(group_key(A, 0), block)
    assert index.find(A, 0) == 3
    assert index.find(A, 1) is None
    assert index.remove(3) == group_key(A, 0)
    assert index.find(A, 0) == 5
    index.remove(5)
    assert index.find(A, 0) == 9
    index.check()
    index.remove(9)
    assert index.find(A, 0) is None
    assert len(index) == 0
    index.check()


def test_a_block_cannot_hold_two_contents() -> None:
    index = PrefixIndex(NoEvents())
    index.add(group_key(A, 0), 1)
    with pytest.raises(RuntimeError, match="findable already"):
        index.add(group_key(B, 0), 1)


def test_SCH_27_events_tell_of_the_first_and_the_last_of_duplicates_only() -> None:
    index = PrefixIndex(EventLog())
    index.add(group_key(A, 2), 1)
    index.add(group_key(A, 2), 4)
    assert index.take_events() == (CacheEvent("stored", 2, A),)
    index.remove(1)
    assert index.take_events() == ()
    index.remove(4)
    assert index.take_events() == (CacheEvent("removed", 2, A),)


def test_SCH_27_clearing_is_told_before_what_came_after_it() -> None:
    index = PrefixIndex(EventLog())
    index.add(group_key(A, 0), 1)
    index.clear()
    index.add(group_key(B, 1), 1)
    assert index.take_events() == (CacheEvent("cleared"), CacheEvent("stored", 1, B))


def test_what_comes_and_goes_between_two_readings_is_not_told() -> None:
    index = PrefixIndex(EventLog())
    index.add(group_key(A, 0), 1)
    index.take_events()
    index.remove(1)
    index.add(group_key(A, 0), 2)
    index.add(group_key(B, 0), 3)
    index.remove(3)
    assert index.take_events() == ()


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "remove", "clear", "read"]), st.integers(1, 6), st.integers(0, 2)),
        max_size=60,
    )
)
def test_events_add_up_to_the_index(ops: list[tuple[str, int, int]]) -> None:
    index = PrefixIndex(EventLog())
    held: dict[int, bytes] = {}
    known: set[tuple[int, bytes]] = set()
    for op, block, content in [*ops, ("read", 0, 0)]:
        if op == "add" and block not in held:
            held[block] = group_key(BlockHash(bytes([content]) * 4), content % 2)
            index.add(held[block], block)
        elif op == "remove" and block in held:
            assert index.remove(block) == held.pop(block)
        elif op == "clear":
            held.clear()
            index.clear()
        elif op == "read":
            for event in index.take_events():
                if event.kind == "cleared":
                    known.clear()
                else:
                    (known.add if event.kind == "stored" else known.remove)((event.group, event.block_hash))
            assert known == {(int.from_bytes(k[-4:], "big"), k[:-4]) for k in held.values()}
        index.check()
        assert index.items() == held
