"""Own the blocks: who holds each, and which is reused next.

Promises: every block is in exactly one state; taking, holding and giving back are O(1) a block;
`untake` and `unhold` undo their twins exactly when called in reverse order.
Does not know: hashes, requests or groups. It is told which blocks keep findable content.

Blocks are reused in this order (SCH-22):

1. *plain*: free, holding nothing findable; the last freed first, since it is warm;
2. *virgin*: never taken; lowest first, so that memory is touched only when it is needed;
3. *kept*: free, holding findable content; the first freed first.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

USED: Final = 0
PLAIN: Final = 1
KEPT: Final = 2
VIRGIN: Final = 3


class Taken(msgspec.Struct, frozen=True, gc=False):
    """Blocks of one `take`, in order: first plain ones, then virgin, then kept (whose content is lost)."""

    blocks: tuple[int, ...] = ()
    num_plain: int = 0
    num_virgin: int = 0

    @property
    def evicted(self) -> tuple[int, ...]:
        """The blocks that held findable content."""
        return self.blocks[self.num_plain + self.num_virgin :]


class Held(msgspec.Struct, frozen=True, gc=False):
    """One more holder of a block; `neighbours` is where it stood among the kept, None if it was in use."""

    block: int
    neighbours: tuple[int, int] | None


class BlockPool:
    """Blocks 1 .. num_blocks - 1; block 0 is the null block, never counted, never given (SCH-20).

    Both free lists are rings through `_next` and `_prev`: entry 0 is the head of the plain ring and
    entry `num_blocks` that of the kept ring, so that no end needs special care.

    Owns: the state and number of holders of every block, and the order of the free ones.
    """

    __slots__ = ("_holders", "_kept", "_next", "_prev", "_state", "_virgin", "num_blocks", "num_free")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self._kept = num_blocks
        self._virgin = 1
        self._next = list(range(num_blocks + 1))
        self._prev = list(range(num_blocks + 1))
        self._holders = [0] * num_blocks
        self._state = bytearray([VIRGIN]) * num_blocks
        self._state[0] = USED

    # ---- new content -------------------------------------------------------------------------

    def take(self, count: int) -> Taken:
        """`count` blocks for new content, each with one holder; as many must be free."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks were asked of a pool with {self.num_free} free ones")
        self.num_free -= count
        blocks = self._pop(0, count)
        num_plain = len(blocks)
        num_virgin = min(count - num_plain, self.num_blocks - self._virgin)
        if num_virgin:
            fresh = range(self._virgin, self._virgin + num_virgin)
            self._virgin = fresh.stop
            for block in fresh:
                self._state[block] = USED
                self._holders[block] = 1
            blocks.extend(fresh)
        if len(blocks) < count:
            blocks.extend(self._pop(self._kept, count - len(blocks)))
        return Taken(tuple(blocks), num_plain, num_virgin)

    def untake(self, taken: Taken, keeps: Iterable[int]) -> None:
        """Undo a `take` whose blocks were not written; those in `keeps` have their content findable again."""
        keep = frozenset(keeps)
        self.num_free += len(taken.blocks)
        for block in reversed(taken.evicted):
            self._free(block, keep=block in keep, front=True)
        end = taken.num_plain + taken.num_virgin
        virgin = taken.blocks[taken.num_plain : end]
        if virgin and virgin[-1] == self._virgin - 1:
            self._virgin = virgin[0]
            for block in virgin:
                self._state[block] = VIRGIN
                self._holders[block] = 0
        else:  # others were taken after these and are still held
            for block in reversed(virgin):
                self._free(block, keep=False)
        for block in reversed(taken.blocks[: taken.num_plain]):
            self._free(block, keep=False)

    # ---- content that is there ---------------------------------------------------------------

    def hold(self, block: int) -> Held:
        """One more holder of a block with findable content (SCH-23)."""
        holders = self._holders
        holders[block] += 1
        if holders[block] > 1:
            return Held(block, None)
        place = (self._prev[block], self._next[block])
        self._unlink(block)
        self._state[block] = USED
        self.num_free -= 1
        return Held(block, place)

    def unhold(self, held: Held, keep: bool) -> None:
        """Undo a `hold`: back to where the block stood, or as near as what happened since allows."""
        block, place = held.block, held.neighbours
        if not keep or place is None or self._holders[block] > 1:
            self.release(block, keep)
            return
        self._holders[block] = 0
        self.num_free += 1
        before, after = place
        if self._is_kept(before):
            self._link(block, before, KEPT)
        elif self._is_kept(after):
            self._link(block, self._prev[after], KEPT)
        else:
            self._link(block, self._prev[self._kept], KEPT)

    def release(self, block: int, keep: bool) -> None:
        """One holder less; a free block goes to the back of the kept, or to the front of the plain (SCH-22)."""
        holders = self._holders
        if holders[block] > 1:
            holders[block] -= 1
            return
        if not holders[block]:
            raise RuntimeError(f"block {block} was given back by somebody who does not hold it")
        self.num_free += 1
        self._free(block, keep)

    def forget(self) -> None:
        """No block keeps findable content any more: the kept become the last of the plain."""
        first = self._next[self._kept]
        if first == self._kept:
            return
        for block in list(self._ring(self._kept)):
            self._state[block] = PLAIN
        last, tail = self._prev[self._kept], self._prev[0]
        self._next[tail], self._prev[first] = first, tail
        self._next[last], self._prev[0] = 0, last
        self._next[self._kept] = self._prev[self._kept] = self._kept

    # ---- looking -----------------------------------------------------------------------------

    def is_free(self, block: int) -> bool:
        """True when nobody holds the block."""
        return self._state[block] != USED

    def holders(self, block: int) -> int:
        """How many hold the block."""
        return self._holders[block]

    def plain(self) -> tuple[int, ...]:
        """Free blocks without findable content that were used before, next to be taken first."""
        return tuple(self._ring(0))

    def kept(self) -> tuple[int, ...]:
        """Free blocks with findable content, next to be evicted first."""
        return tuple(self._ring(self._kept))

    def free_order(self) -> tuple[int, ...]:
        """All free blocks in the order in which `take` would give them."""
        return (*self.plain(), *range(self._virgin, self.num_blocks), *self.kept())

    # ---- rings -------------------------------------------------------------------------------

    def _is_kept(self, entry: int) -> bool:
        return entry == self._kept or self._state[entry] == KEPT

    def _free(self, block: int, keep: bool, front: bool = False) -> None:
        self._holders[block] = 0
        if not keep:
            self._link(block, 0, PLAIN)
        else:
            self._link(block, self._kept if front else self._prev[self._kept], KEPT)

    def _link(self, block: int, before: int, state: int) -> None:
        nexts, prevs = self._next, self._prev
        after = nexts[before]
        nexts[before] = prevs[after] = block
        prevs[block], nexts[block] = before, after
        self._state[block] = state

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before

    def _pop(self, head: int, count: int) -> list[int]:
        """Up to `count` blocks from the front of a ring, now used."""
        nexts, state, holders = self._next, self._state, self._holders
        blocks: list[int] = []
        block = nexts[head]
        while len(blocks) < count and block != head:
            blocks.append(block)
            state[block] = USED
            holders[block] = 1
            block = nexts[block]
        nexts[head] = block
        self._prev[block] = head
        return blocks

    def _ring(self, head: int) -> Iterator[int]:
        block = self._next[head]
        while block != head:
            yield block
            block = self._next[block]

    def check(self) -> None:
        """Raise `RuntimeError` unless rings, states, holders and counts agree."""
        for head, state in ((0, PLAIN), (self._kept, KEPT)):
            before = head
            for count, block in enumerate(self._ring(head)):
                if self._prev[block] != before or self._state[block] != state or count >= self.num_blocks:
                    raise RuntimeError(f"the free list is broken at block {block}")
                before = block
            if self._prev[head] != before:
                raise RuntimeError("the free list's end is broken")
        free = self.free_order()
        if len(set(free)) != len(free) or len(free) != self.num_free or 0 in free:
            raise RuntimeError(
                f"the free list has {len(free)} blocks, {len(set(free))} distinct; {self.num_free} counted"
            )
        listed = frozenset(free)
        for block in range(1, self.num_blocks):
            free_now = self._state[block] != USED
            if free_now != (block in listed) or free_now == bool(self._holders[block]):
                raise RuntimeError(f"block {block} has {self._holders[block]} holders but state {self._state[block]}")
        if self._holders[0] or self._state[0] != USED:
            raise RuntimeError("the null block was held or freed")
