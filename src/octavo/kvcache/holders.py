"""Several that hold blocks, seen as one: the device's cache, and parts that bring blocks from elsewhere (PDX-2, TIR-4).

Promises: a hash is told as stored when the first of them has it, and as removed when the last no longer has.
Does not know: who they are, or where their blocks lie.
"""

from collections.abc import Callable, Sequence

from octavo.kvcache.hashing import BlockHash, group_key
from octavo.kvcache.prefix import CacheEvent, EventLog

TakeEvents = Callable[[], tuple[CacheEvent, ...]]


class Holders:
    """Owns: which keys each of them holds."""

    def __init__(self, sources: Sequence[TakeEvents]) -> None:
        self._sources = tuple(sources)
        self._held: tuple[set[bytes], ...] = tuple(set() for _ in self._sources)

    def take(self) -> tuple[CacheEvent, ...]:
        """What changed for all of them together since the last call."""
        log = EventLog()
        for number, source in enumerate(self._sources):
            held = self._held[number]
            others = self._held[:number] + self._held[number + 1 :]
            for event in source():
                self._note(log, event, held, others)
        return log.take()

    @staticmethod
    def _note(log: EventLog, event: CacheEvent, held: set[bytes], others: Sequence[set[bytes]]) -> None:
        if event.kind == "cleared":
            if not any(others):
                log.cleared()
            else:
                for key in held:
                    if not any(key in other for other in others):
                        log.removed(key)
            held.clear()
            return
        key = group_key(BlockHash(event.block_hash), event.group)
        is_new = not any(key in other for other in others)
        if event.kind == "stored":
            if is_new and key not in held:
                log.stored(key)
            held.add(key)
        elif key in held:
            held.remove(key)
            if is_new:
                log.removed(key)
