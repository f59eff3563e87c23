"""The primary tier's books: which chunk is in which row of host memory, who needs it there, and what goes next.

Promises: a row has one owner at any time; a chunk that is being filled, or that somebody has pinned, keeps its row
whatever happens to the rest (TIR-15), also through a reset (TIR-20); O(1) a chunk but for the search for victims.
Does not know: tiers, jobs, requests or bytes.

Life of a chunk: `fill` takes a row -> `filled` (it can be found) or `failed` (the row is free again), perhaps after
`abandon` -> `pin` and `unpin` -> evicted when room is needed, or `clear`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.features.transfer.control.evict import EvictionPolicy, Key
from octavo.kvcache.prefix import CacheListener, NoEvents


@dataclass(slots=True, eq=False)
class Chunk:
    """One chunk in a row.

    Owns: its row, as long as it is filled, pinned or findable.
    """

    key: Key
    row: int
    ready: bool = False
    pins: int = 0
    detached: bool = False  # forgotten by a reset, its row not yet free

    @property
    def may_go(self) -> bool:
        return self.ready and not self.pins


class HostBlockIndex:
    """Rows of host memory.

    Owns: the free rows, the chunks by key, those that outlived a reset or were given up, how many may go, and the order
    of eviction.
    """

    def __init__(self, num_rows: int, policy: EvictionPolicy, events: CacheListener | None = None) -> None:
        self.num_rows = num_rows
        self._policy = policy
        self._events = NoEvents() if events is None else events
        self._free = list(range(num_rows - 1, -1, -1))
        self._chunks: dict[Key, Chunk] = {}
        self._detached: set[Chunk] = set()  # no key leads to them any more
        self._num_idle = 0  # chunks that have a key and may go
        self.num_evicted = 0

    def __len__(self) -> int:
        """Chunks that have a key, filled or not."""
        return len(self._chunks)

    @property
    def num_free(self) -> int:
        """Rows that nobody owns."""
        return len(self._free)

    @property
    def num_detached(self) -> int:
        """Rows in use that nothing is found in: they are free when the last who uses them is done."""
        return len(self._detached)

    def get(self, key: Key) -> Chunk | None:
        """The chunk of this key, filled or not."""
        return self._chunks.get(key)

    def num_leading(self, keys: Sequence[Key]) -> int:
        """How many of these, from the first on, are there and filled."""
        get, count = self._chunks.get, 0
        for key in keys:
            chunk = get(key)
            if chunk is None or not chunk.ready:
                break
            count += 1
        return count

    def touch(self, chunk: Chunk) -> None:
        """The chunk was used by a request: a cascade's reading is none (TIR-15)."""
        if not chunk.detached:
            self._policy.touch(chunk.key)

    def fill(self, keys: Iterable[Key], keep: Sequence[Key] = ()) -> list[Chunk]:
        """Chunks to be filled for the first of `keys`, as far as there is room; no key may have one already.

        Room is made by evicting what may go and is not in `keep`.
        """
        wanted = list(keys)
        missing = len(wanted) - len(self._free)
        if missing > 0 and self._num_idle:
            kept, chunks_by_key = frozenset(keep), self._chunks
            self._evict(self._policy.victims(missing, lambda key: key not in kept and chunks_by_key[key].may_go))
        chunks = []
        for key in wanted[: len(self._free)]:
            if key in self._chunks:
                raise RuntimeError("a chunk was to be filled that is there")
            chunk = Chunk(key, self._free.pop())
            self._chunks[key] = chunk
            self._policy.add(key)
            chunks.append(chunk)
        return chunks

    def _evict(self, keys: tuple[Key, ...]) -> None:
        for key in keys:
            self._policy.evict(key)
            self._free.append(self._chunks.pop(key).row)
            self._events.removed(key)
        self.num_evicted += len(keys)
        self._num_idle -= len(keys)

    def filled(self, chunk: Chunk) -> None:
        """Its bytes are there."""
        chunk.ready = True
        if not chunk.detached:
            self._num_idle += 1
            self._events.stored(chunk.key)
        self._settle(chunk)

    def failed(self, chunk: Chunk) -> None:
        """Its bytes will not come: it is gone."""
        if chunk.detached:
            chunk.ready = True
            self._settle(chunk)
            return
        del self._chunks[chunk.key]
        self._policy.remove(chunk.key)
        self._free.append(chunk.row)

    def abandon(self, chunk: Chunk) -> None:
        """Its bytes are waited for no longer: it cannot be found, and its row is out of use until `filled` or `failed`
        says that nobody writes there any more."""
        if chunk.ready:
            raise RuntimeError("a chunk was given up that is there")
        if not chunk.detached:
            del self._chunks[chunk.key]
            self._policy.remove(chunk.key)
            chunk.detached = True
            self._detached.add(chunk)

    def pin(self, chunk: Chunk) -> None:
        """Somebody reads the row until `unpin`."""
        if not chunk.ready:
            raise RuntimeError("a chunk was pinned before it was filled")
        if not chunk.pins and not chunk.detached:
            self._num_idle -= 1
        chunk.pins += 1

    def use(self, keys: Sequence[Key]) -> list[Chunk]:
        """Pin and touch the chunks of these keys, which are there: thousands of them, in one step."""
        get, touch, chunks, idle = self._chunks.get, self._policy.touch, [], 0
        for key in keys:
            chunk = get(key)
            if chunk is None or not chunk.ready:
                raise RuntimeError("a chunk was to be loaded that is not there; look it up in the same step")
            idle += not chunk.pins
            chunk.pins += 1
            touch(key)
            chunks.append(chunk)
        self._num_idle -= idle
        return chunks

    def unpin(self, chunk: Chunk) -> None:
        """Once for each `pin`."""
        if not chunk.pins:
            raise RuntimeError("a chunk was unpinned more often than it was pinned")
        chunk.pins -= 1
        if not chunk.pins and not chunk.detached:
            self._num_idle += 1
        self._settle(chunk)

    def _settle(self, chunk: Chunk) -> None:
        """The row of a forgotten chunk is free when the last who uses it is done."""
        if chunk.detached and chunk.may_go:
            self._detached.remove(chunk)
            self._free.append(chunk.row)

    def clear(self) -> None:
        """Nothing is found any more; rows in use become free when they no longer are."""
        for chunk in self._chunks.values():
            chunk.detached = True
            self._detached.add(chunk)
        chunks = list(self._chunks.values())
        self._chunks.clear()
        self._num_idle = 0
        self._policy.clear()
        self._events.cleared()
        for chunk in chunks:
            self._settle(chunk)

    def check(self) -> None:
        """Raise `RuntimeError` unless every row is owned once and the policy knows what there is."""
        owned = [c.row for c in self._chunks.values()] + [c.row for c in self._detached] + self._free
        if sorted(owned) != list(range(self.num_rows)):
            raise RuntimeError("rows of the primary tier are lost or owned twice")
        if len(self._policy) != len(self._chunks):
            raise RuntimeError(f"the eviction policy knows {len(self._policy)} chunks of {len(self._chunks)}")
        if self._num_idle != sum(chunk.may_go for chunk in self._chunks.values()):
            raise RuntimeError("the primary tier miscounts the chunks that may go")
        if any(c.detached or key != c.key for key, c in self._chunks.items()) or any(
            not c.detached or c.may_go for c in self._detached
        ):
            raise RuntimeError("a chunk is forgotten and findable, or keeps a row for nobody")
