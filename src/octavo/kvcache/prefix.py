"""Find a block by the hash of what it holds.

Promises: a key finds a block as long as one block carries it; duplicates are kept, not merged (SCH-25).
Does not know: who holds a block, which block is evicted next, or what a window is.
"""

from collections.abc import Iterable
from typing import Literal, Protocol

import msgspec

from octavo.base.outputs import CacheChanges
from octavo.kvcache.hashing import BlockHash, group_key


class CacheEvent(msgspec.Struct, frozen=True):
    """What routers and tiers want to know: a hash became findable, stopped being so, or all did (SCH-27).

    `group` and `block_hash` are empty for "cleared", which comes before the others of its batch.
    """

    kind: Literal["stored", "removed", "cleared"]
    group: int = 0
    block_hash: bytes = b""


def changes_of(events: Iterable[CacheEvent], group: int = 0) -> CacheChanges | None:
    """What these events say about one group, as one change; None when they say nothing about it."""
    cleared = False
    hashes: dict[str, list[bytes]] = {"stored": [], "removed": []}
    for event in events:
        if event.kind == "cleared":
            cleared = True
        elif event.group == group:
            hashes[event.kind].append(event.block_hash)
    if not (cleared or hashes["stored"] or hashes["removed"]):
        return None
    return CacheChanges(cleared=cleared, removed=tuple(hashes["removed"]), stored=tuple(hashes["stored"]))


class CacheListener(Protocol):
    """Who listens to the index. Keys are `hashing.group_key`s."""

    def stored(self, key: bytes) -> None:
        """The key became findable."""

    def removed(self, key: bytes) -> None:
        """No block carries the key any more."""

    def cleared(self) -> None:
        """Nothing is findable any more."""

    def take(self) -> tuple[CacheEvent, ...]:
        """Events since the last call."""


class NoEvents:
    """Nobody listens.

    Owns: nothing.
    """

    def stored(self, key: bytes) -> None:
        return None

    def removed(self, key: bytes) -> None:
        return None

    def cleared(self) -> None:
        return None

    def take(self) -> tuple[CacheEvent, ...]:
        return ()


class EventLog:
    """Keeps the net change since it was last read: what came and went in between is not told.

    Owns: the pending change of each key.
    """

    def __init__(self) -> None:
        self._cleared = False
        self._pending: dict[bytes, Literal["stored", "removed"]] = {}

    def stored(self, key: bytes) -> None:
        """Note it, or drop a pending removal."""
        if self._pending.pop(key, None) is None:
            self._pending[key] = "stored"

    def removed(self, key: bytes) -> None:
        """Note it, or drop a pending storing."""
        if self._pending.pop(key, None) is None:
            self._pending[key] = "removed"

    def cleared(self) -> None:
        """Whatever was pending no longer matters."""
        self._pending.clear()
        self._cleared = True

    def take(self) -> tuple[CacheEvent, ...]:
        """Clearing first, then the keys in the order in which they changed."""
        first = (CacheEvent("cleared"),) if self._cleared else ()
        rest = [CacheEvent(kind, int.from_bytes(k[-4:], "big"), k[:-4]) for k, kind in self._pending.items()]
        self._cleared = False
        self._pending = {}
        return (*first, *rest)


class PrefixIndex:
    """Key to block, and block to key (SCH-21).

    Owns: both maps, and `version`, which grows whenever a block loses its key. A value of the first map
    is a block, or a set of them only when several carry one key.
    """

    __slots__ = ("_blocks", "_events", "_keys", "version")

    def __init__(self, events: CacheListener) -> None:
        self._events = events
        self.version = 0
        self._blocks: dict[bytes, int | set[int]] = {}
        self._keys: dict[int, bytes] = {}

    def find(self, h: BlockHash, group: int) -> int | None:
        """A block of `group` with this content; the lowest of duplicates, so that the answer has no history."""
        found = self._blocks.get(group_key(h, group))
        return min(found) if isinstance(found, set) else found

    def key_of(self, block: int) -> bytes | None:
        """The key that finds this block."""
        return self._keys.get(block)

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: bytes, block: int) -> None:
        """`block`, which has no key, now holds what `key` names."""
        if block in self._keys:
            raise RuntimeError(f"block {block} is findable already, as other content")
        self._keys[block] = key
        found = self._blocks.get(key)
        if found is None:
            self._blocks[key] = block
            self._events.stored(key)
        elif isinstance(found, set):
            found.add(block)
        else:
            self._blocks[key] = {found, block}

    def remove(self, block: int) -> bytes:
        """The content of `block` is given up; its key."""
        key = self._keys.pop(block)
        self.version += 1
        found = self._blocks[key]
        if not isinstance(found, set):
            del self._blocks[key]
            self._events.removed(key)
        else:
            found.remove(block)
            if len(found) == 1:
                self._blocks[key] = found.pop()
        return key

    def clear(self) -> None:
        """Nothing is findable any more."""
        self._blocks.clear()
        self._keys.clear()
        self.version += 1
        self._events.cleared()

    def take_events(self) -> tuple[CacheEvent, ...]:
        """Events since the last call."""
        return self._events.take()

    def items(self) -> dict[int, bytes]:
        """A copy of block to key."""
        return dict(self._keys)

    def check(self) -> None:
        """Raise `RuntimeError` unless both maps say the same."""
        seen: dict[int, bytes] = {}
        for key, found in self._blocks.items():
            if isinstance(found, set) and len(found) < 2:
                raise RuntimeError("the prefix index keeps a set for a single block")
            for block in found if isinstance(found, set) else (found,):
                seen[block] = key
        if seen != self._keys:
            raise RuntimeError("the prefix index and the blocks' keys disagree")
