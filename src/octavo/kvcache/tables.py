"""The block tables of one request, one a group, and the marks that make quiet steps cheap.

Promises: three thresholds (`capacity`, `expires_at`, `commit_at`) say without a look at the tables
whether a step changes anything.
Does not know: the pool, hashes, or other requests.
"""

from collections.abc import Iterator, Sequence
from enum import Enum, auto
from itertools import accumulate

import msgspec

from octavo.kvcache.policies import NEVER, NULL_BLOCK, BlockPolicy
from octavo.kvcache.pool import Held, Taken


class LookupReason(Enum):
    """Why a prefix is looked up, which decides what is counted when it is used."""

    FRESH = auto()  # a prompt that comes for the first time: its tokens were asked for, and found or not
    RESUMED = auto()  # one that lost its blocks and finds what it had computed itself
    SIBLING = auto()  # a further answer to a prompt that the first of them has computed


class PrefixHit(msgspec.Struct, frozen=True):
    """The longest prefix that all groups have: `blocks[g]` is the table's start, null block 0 where not needed.

    `version` says of which state of the prefix index this is true.
    """

    num_tokens: int
    blocks: tuple[tuple[int, ...], ...]
    version: int = 0
    lookup: LookupReason = LookupReason.FRESH


class Reservation(msgspec.Struct, frozen=True):
    """Blocks one `reserve` gave. `new_blocks[g]` is to be appended to the block table of group g.

    The other fields are for `cancel`: what was taken from the pool, what content that cost, and whose
    blocks are shared since.
    """

    request_id: str
    new_blocks: tuple[tuple[int, ...], ...]
    created: bool = False  # the request had no blocks before
    queried: int = 0  # tokens that the admission looked up
    found: int = 0  # tokens that it found
    lookup: LookupReason = LookupReason.FRESH
    taken: Taken = Taken()
    held: tuple[Held, ...] = ()
    lost: tuple[tuple[int, bytes], ...] = ()  # block, key of the content it had
    owed: int = 0  # what the request was owed before
    resets: int = 0  # how often the prefix cache had been reset


class Tables:
    """One request's blocks.

    Owns: the block ids by group; by group also how far blocks have expired (`passed`), how many null
    blocks stand in their place, how many blocks were committed and how many of these a hit had brought;
    how many hash-chain blocks were reported; how many blocks its admission is still `owed`; and whether the content may still be committed (`stale` after a reset of the cache).
    """

    __slots__ = (
        "blocks",
        "capacity",
        "commit_at",
        "committed",
        "expires_at",
        "from_hit",
        "nothing",
        "nulls",
        "owed",
        "passed",
        "reported",
        "stale",
    )  # fmt: skip

    def __init__(self, request_id: str, num_groups: int, stale: bool) -> None:
        self.blocks: list[list[int]] = [[] for _ in range(num_groups)]
        self.passed = [0] * num_groups
        self.nulls = [0] * num_groups
        self.committed = [0] * num_groups
        self.from_hit = [0] * num_groups
        self.reported = 0
        self.owed = 0
        self.stale = stale
        self.capacity = 0  # tokens that the blocks can hold
        self.expires_at = NEVER  # computed tokens at which the next block expires
        self.commit_at = NEVER  # certain tokens at which the next block is full
        self.nothing = Reservation(request_id, ((),) * num_groups)

    def settle(self, policies: Sequence[BlockPolicy]) -> None:
        """Bring the three thresholds up to date after any change."""
        self.measure(policies)
        self.expires_at = min([p.expires_at(s) for s, p in zip(self.passed, policies, strict=True)], default=NEVER)
        self.commit_at = NEVER
        if not self.stale:
            commits = [(c + 1) * p.block_size for c, p in zip(self.committed, policies, strict=True)]
            self.commit_at = min(commits, default=NEVER)

    def measure(self, policies: Sequence[BlockPolicy]) -> None:
        """Bring `capacity` up to date, the only threshold that growing changes."""
        capacity = NEVER
        for row, policy in zip(self.blocks, policies, strict=True):
            tokens = len(row) * policy.block_size
            if tokens < capacity:
                capacity = tokens
        self.capacity = capacity

    def adopt(self, num_blocks: Sequence[int], num_hashes: int) -> None:
        """The first blocks by group, worth `num_hashes` of the chain, came findable from a hit."""
        self.from_hit = list(num_blocks)
        self.committed = list(num_blocks)
        self.reported = num_hashes

    def expire(self, policies: Sequence[BlockPolicy], num_computed_tokens: int) -> list[int]:
        """Put null blocks where windows have passed; the blocks that were there, last first."""
        gone: list[int] = []
        self.expires_at = NEVER
        for group, policy in enumerate(policies):
            row, passed, expired = self.blocks[group], self.passed[group], policy.expired(num_computed_tokens)
            stop = min(expired.stop, len(row))
            if stop > passed:
                for i in range(stop - 1, max(expired.start, passed) - 1, -1):
                    if row[i] != NULL_BLOCK:
                        gone.append(row[i])
                        row[i] = NULL_BLOCK
                        self.nulls[group] += 1
                self.passed[group] = passed = stop
            self.expires_at = min(self.expires_at, policy.expires_at(passed))
        return gone

    def append(self, new_blocks: Sequence[Sequence[int]]) -> None:
        """Make the tables longer."""
        for group, new in enumerate(new_blocks):
            self.blocks[group].extend(new)
            self.nulls[group] += new.count(NULL_BLOCK)

    def drop_tail(self, new_blocks: Sequence[Sequence[int]]) -> None:
        """Undo `append`; raises `RuntimeError` when the tables do not end so, or these blocks were committed."""
        for group, new in enumerate(new_blocks):
            row = self.blocks[group]
            left = len(row) - len(new)
            if left < 0 or tuple(row[left:]) != tuple(new) or self.committed[group] > max(left, self.from_hit[group]):
                raise RuntimeError("a reservation can only be cancelled before the request reserves or commits again")
        for group, new in enumerate(new_blocks):
            if new:
                del self.blocks[group][-len(new) :]
                self.nulls[group] -= new.count(NULL_BLOCK)

    def live(self) -> list[int]:
        """Blocks that the request holds, by group."""
        return [len(row) - nulls for row, nulls in zip(self.blocks, self.nulls, strict=True)]

    def tail_first(self, policies: Sequence[BlockPolicy]) -> list[int]:
        """All held blocks in the order of freeing: later tokens first, whatever the group (SCH-22)."""
        if len(self.blocks) == 1:
            return [b for b in reversed(self.blocks[0]) if b != NULL_BLOCK]
        placed = [
            (-i * policy.block_size, group, row[i])
            for group, (row, policy) in enumerate(zip(self.blocks, policies, strict=True))
            for i in range(len(row))
            if row[i] != NULL_BLOCK
        ]
        placed.sort()
        return [block for _, _, block in placed]

    def held(self) -> Iterator[int]:
        """All held blocks."""
        return (b for row in self.blocks for b in row if b != NULL_BLOCK)

    def check(self, policies: Sequence[BlockPolicy]) -> None:
        """Raise `RuntimeError` unless counts, thresholds and null blocks fit the tables."""
        thresholds = (self.capacity, self.expires_at, self.commit_at)
        self.settle(policies)
        if thresholds != (self.capacity, self.expires_at, self.commit_at):
            raise RuntimeError("a request's thresholds are out of date")
        for group, row in enumerate(self.blocks):
            if row.count(NULL_BLOCK) != self.nulls[group] or self.committed[group] > len(row):
                raise RuntimeError(f"a request's counts in group {group} are wrong")
            start = policies[group].expired(NEVER).start
            if any((b == NULL_BLOCK) != (start <= i < self.passed[group]) for i, b in enumerate(row)):
                raise RuntimeError(f"a request's null blocks in group {group} are not where the window passed")


def split_by(blocks: tuple[int, ...], counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Cut a tuple into pieces of these lengths."""
    stops = list(accumulate(counts))
    return tuple([blocks[stop - count : stop] for stop, count in zip(stops, counts, strict=True)])
