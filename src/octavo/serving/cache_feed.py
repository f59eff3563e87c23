"""What the engine's prefix cache holds, kept on this side for those who want to follow it (SCH-27).

Promises: a follower gets what is there and then every change, in order and none twice; one who is slower than the
cache is cut off instead of being buffered for without limit, and may come again. Used on the event loop only.
Does not know: sockets, or how changes are found.

The copy is as large as the cache: one hash a block.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable
from typing import Protocol

from octavo.base.errors import NotFoundError
from octavo.base.outputs import CacheChanges
from octavo.kvcache.published import Scheme

MAX_WAITING_HASHES = 1 << 16  # of one follower; about 6 MB


class Follower:
    """One follower's place: `snapshot` is what was there when it came.

    Owns: the changes that wait for it.
    """

    def __init__(
        self, snapshot: tuple[bytes, ...], leave: "Callable[[Follower], None]", limit: int = MAX_WAITING_HASHES
    ) -> None:
        self.snapshot = snapshot
        self.lagging = asyncio.Event()  # it was too slow, and gets no more
        self._leave = leave
        self._limit = limit
        self._waiting: deque[CacheChanges] = deque()
        self._size = 0
        self._ended = False
        self._news = asyncio.Event()

    def put(self, changes: CacheChanges) -> None:
        """Hand over a change."""
        self._size += _size(changes)
        if self._size > self._limit:
            self.lagging.set()
            self.end()
            self._waiting.clear()
            return
        self._waiting.append(changes)
        self._news.set()

    def end(self) -> None:
        """Nothing more will come."""
        self._ended = True
        self._leave(self)
        self._news.set()

    async def next(self) -> CacheChanges | None:
        """The next change; None after the last one. It may be cancelled and asked again."""
        while not self._waiting:
            if self._ended:
                return None
            self._news.clear()
            await self._news.wait()
        changes = self._waiting.popleft()
        self._size -= _size(changes)
        return changes


def _size(changes: CacheChanges) -> int:
    return 1 + len(changes.removed) + len(changes.stored)


class Feed(Protocol):
    """Where the front puts changes, and where followers come."""

    scheme: Scheme
    epoch: str

    def absorb(self, changes: CacheChanges) -> None:
        """The cache changed."""

    def follow(self) -> Follower:
        """A place for one follower; raises `NotFoundError` where nothing is recorded."""

    def close(self) -> None:
        """The engine is gone."""


class NoFeed:
    """Nothing is recorded.

    Owns: nothing.
    """

    scheme = Scheme(hash="", hash_block_size=1, block_size=1)
    epoch = ""

    def absorb(self, changes: CacheChanges) -> None:
        return None

    def follow(self) -> Follower:
        raise NotFoundError("this server does not tell what its cache holds; start it with --kv-events")

    def close(self) -> None:
        return None


class CacheFeed:
    """The copy and its followers. `epoch` names this start of the engine.

    Owns: the hashes that can be found now, oldest first, and who follows.
    """

    def __init__(self, scheme: Scheme, *, epoch: str | None = None, limit: int = MAX_WAITING_HASHES) -> None:
        self.scheme = scheme
        self.epoch = epoch or secrets.token_hex(8)
        self._limit = limit
        self._hashes: dict[bytes, None] = {}
        self._followers: set[Follower] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._hashes)

    def absorb(self, changes: CacheChanges) -> None:
        if changes.cleared:
            self._hashes.clear()
        for h in changes.removed:
            self._hashes.pop(h, None)
        self._hashes.update(dict.fromkeys(changes.stored))
        for follower in tuple(self._followers):
            follower.put(changes)

    def follow(self) -> Follower:
        follower = Follower(tuple(self._hashes), self._followers.discard, self._limit)
        if self._closed:
            follower.end()
        else:
            self._followers.add(follower)
        return follower

    def close(self) -> None:
        self._closed = True
        for follower in tuple(self._followers):
            follower.end()
