"""Which chunk of the primary tier goes when room is needed: LRU, ARC, or a class of one's own (TIR-15).

Promises: a policy knows keys and their order, nothing else; every operation but `victims` is O(1).
Does not know: rows, tiers, jobs, or why a chunk may not go.

Order of calls for one key: `add` -> `touch`... -> `evict` (it went to make room) or `remove` (it went for another
reason). A policy may remember keys that are gone, but no more than `capacity` of them.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Protocol

from octavo.base.errors import ConfigError
from octavo.plugins.registry import load_target

Key = bytes


class EvictionPolicy(Protocol):
    """The order in which resident keys are given up."""

    def add(self, key: Key) -> None:
        """The key became resident; it was not."""

    def touch(self, key: Key) -> None:
        """Somebody used the resident key."""

    def remove(self, key: Key) -> None:
        """The resident key is gone, but not to make room: nothing is to be learnt from that."""

    def evict(self, key: Key) -> None:
        """The resident key was given up to make room."""

    def victims(self, count: int, may_go: Callable[[Key], bool]) -> tuple[Key, ...]:
        """Up to `count` resident keys that may go, the first to go first. Changes nothing."""

    def clear(self) -> None:
        """Forget everything."""

    def __len__(self) -> int:
        """Resident keys."""


class LRU:
    """The key that was used longest ago goes first.

    Owns: the resident keys, in order of their last use.
    """

    def __init__(self, capacity: int) -> None:
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def add(self, key: Key) -> None:
        self._keys[key] = None

    def touch(self, key: Key) -> None:
        self._keys.move_to_end(key)

    def remove(self, key: Key) -> None:
        del self._keys[key]

    def evict(self, key: Key) -> None:
        del self._keys[key]

    def victims(self, count: int, may_go: Callable[[Key], bool]) -> tuple[Key, ...]:
        return _first(count, self._keys, may_go)

    def clear(self) -> None:
        self._keys.clear()

    def __len__(self) -> int:
        return len(self._keys)


class ARC:
    """Keys used once and keys used again share the room; what is asked for after it went shifts the border.

    Megiddo and Modha, ARC: A Self-Tuning, Low Overhead Replacement Cache, FAST 2003. There, each miss evicts one page;
    here eviction comes in batches and passes over keys that may not go.

    Owns: the resident keys of both kinds, the remembered ones of both kinds, and the border between them.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._once: OrderedDict[Key, None] = OrderedDict()  # T1
        self._again: OrderedDict[Key, None] = OrderedDict()  # T2
        self._once_gone: OrderedDict[Key, None] = OrderedDict()  # B1
        self._again_gone: OrderedDict[Key, None] = OrderedDict()  # B2
        self.target = 0.0  # keys used once that should be resident, 0 .. capacity

    def add(self, key: Key) -> None:
        once, again = len(self._once_gone), len(self._again_gone)
        if key in self._once_gone:  # it should have stayed: more room for keys used once
            self.target = min(float(self._capacity), self.target + max(1.0, again / once))
            del self._once_gone[key]
            self._again[key] = None
        elif key in self._again_gone:
            self.target = max(0.0, self.target - max(1.0, once / again))
            del self._again_gone[key]
            self._again[key] = None
        else:
            self._once[key] = None

    def touch(self, key: Key) -> None:
        if key in self._once:
            del self._once[key]
            self._again[key] = None
        else:
            self._again.move_to_end(key)

    def remove(self, key: Key) -> None:
        del (self._once if key in self._once else self._again)[key]

    def evict(self, key: Key) -> None:
        if key in self._once:
            del self._once[key]
            self._remember(self._once_gone, key)
        else:
            del self._again[key]
            self._remember(self._again_gone, key)

    def _remember(self, gone: "OrderedDict[Key, None]", key: Key) -> None:
        """Both lists of the gone have room for `capacity` keys together; the longer one gives."""
        gone[key] = None
        if len(self._once_gone) + len(self._again_gone) > self._capacity:
            longer = max(self._once_gone, self._again_gone, key=len)
            longer.popitem(last=False)

    def victims(self, count: int, may_go: Callable[[Key], bool]) -> tuple[Key, ...]:
        surplus = max(0, len(self._once) - int(self.target))
        first = _first(min(count, surplus), self._once, may_go)
        chosen = set(first)
        rest = (key for key in chain(self._again, self._once) if key not in chosen)
        return first + _first(count - len(first), rest, may_go)

    def clear(self) -> None:
        for keys in (self._once, self._again, self._once_gone, self._again_gone):
            keys.clear()
        self.target = 0.0

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def num_remembered(self) -> int:
        """Keys that are gone and not forgotten."""
        return len(self._once_gone) + len(self._again_gone)


def _first(count: int, keys: Iterable[Key], may_go: Callable[[Key], bool]) -> tuple[Key, ...]:
    def going() -> Iterator[Key]:
        left = count
        for key in keys:
            if left <= 0:
                return
            if may_go(key):
                left -= 1
                yield key

    return tuple(going())


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """ "lru", "arc", or "module:Class" of a class that is called with the capacity. Raises `ConfigError`."""
    builtin: dict[str, Callable[[int], EvictionPolicy]] = {"lru": LRU, "arc": ARC}
    if name in builtin:
        return builtin[name](capacity)
    if ":" not in name:
        raise ConfigError(f"--kv-tier host?policy={name}: this policy is unknown; use lru, arc or module:Class")
    try:
        policy: EvictionPolicy = load_target(name)(capacity)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--kv-tier host?policy={name}: this policy cannot be imported: {error}") from None
    return policy
