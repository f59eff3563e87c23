"""Where a prefix is: the primary is looked at, tiers are asked side by side, promotions are begun (TIR-10, TIR-11).

Promises: all tiers of a request are asked at once, and it waits only while one of them that is worth waiting for may
still have what it needs; one step asks for and promotes `A_STEP` chunks at most; a promotion takes its rows at once and
none from its own prefix.
Does not know: jobs, or stores.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Final

from octavo.features.transfer.control.askers import Asker, Askers
from octavo.features.transfer.control.evict import Key
from octavo.features.transfer.control.host_index import HostBlockIndex
from octavo.features.transfer.control.tier_state import TierState

TRY_AGAIN: Final = 64  # every so many requests a tier that is too slow is asked all the same: it may be faster by now
A_STEP: Final = 384


class ChunkState(Enum):
    """What is known of a chunk."""

    HIT = "hit"  # in the primary
    PENDING = "pending"  # on its way there
    RETRY = "retry"  # somebody is being asked
    MISS = "miss"


@dataclass(frozen=True, slots=True)
class PrefixLookup:
    """How many of the leading chunks are in the primary, and what is known of the first that is not.

    `state` is HIT when all are there. Where it is PENDING or RETRY, asking again in a later step gives more.
    """

    num_ready: int
    state: ChunkState


@dataclass(slots=True)
class _Look:
    """One request's lookup while it is made. Owns: what it is about to promote, and whom it may ask."""

    asker: Asker
    mine: tuple[str, ...]
    now: float
    promote: list[tuple[Key, int]] = field(default_factory=list)
    taken: dict[int, int] = field(default_factory=dict)  # rows of each tier, of those about to be promoted
    may_ask: dict[int, bool] = field(default_factory=dict)
    cut: bool = False  # it goes no further now


class Search:
    """Owns: who waits for chunks on their way to the primary, and what is left to be begun in this step."""

    def __init__(
        self, primary: HostBlockIndex, tiers: Sequence[TierState], patience_s: float, chunk_bytes: int
    ) -> None:
        self._primary = primary
        self._tiers = tiers
        self._patience_s = patience_s
        self._chunk_bytes = chunk_bytes
        self._awaiting: dict[Key, tuple[str, ...]] = {}
        self._left = A_STEP
        self._cut = False
        self.num_lookups = 0  # chunks
        self.no_room = 0

    def end_step(self) -> bool:
        """A new step may begin as much again. True: some lookup would go further now."""
        cut, self._cut, self._left = self._cut, False, A_STEP
        return cut

    def lookup(self, request_id: str, asker: Asker, keys: Sequence[Key], compute_s: float, now: float) -> PrefixLookup:
        """What is known of a prefix's chunks; see `TierStack.lookup`."""
        if asker.worth is None:
            self.num_lookups += len(keys)
            asker.worth = self._worth(asker.tiers, compute_s)
        num_ready = self._primary.num_leading(keys)
        if num_ready == len(keys):
            asker.began = None
            return PrefixLookup(num_ready, ChunkState.HIT)
        state = ChunkState.MISS if asker.tired else self._beyond(_Look(asker, (request_id,), now), keys, num_ready)
        if state is ChunkState.MISS:
            asker.began = None
        elif not asker.waits(now, self._patience_s, compute_s * len(keys)):
            state = ChunkState.MISS
        return PrefixLookup(num_ready, state)

    def _worth(self, tiers: int, compute_s: float) -> int:
        """Those that read a chunk sooner than it is computed, and now and then the others (TIR-33)."""
        worth = tiers
        for number in _bits(tiers):
            tier = self._tiers[number]
            if 0 < compute_s < tier.read_speed.seconds(self._chunk_bytes):
                tier.not_worth += 1
                if tier.not_worth % TRY_AGAIN:
                    worth &= ~(1 << number)
        return worth

    def _beyond(self, look: _Look, keys: Sequence[Key], num_ready: int) -> ChunkState:
        """What is known of the first chunk that is not there; begins what can be begun for it and those behind it."""
        state: ChunkState | None = None
        for key in islice(keys, num_ready, None):
            one = self._one(look, key)
            state = state or one
            if one is ChunkState.MISS or look.cut:
                break
        self._cut |= look.cut and not self._left  # what a tier has no room for waits for its reports
        promoted = self._promote(look, keys)
        if state is ChunkState.PENDING and look.promote and not promoted and look.promote[0][0] == keys[num_ready]:
            return ChunkState.MISS
        return state or ChunkState.MISS

    def _one(self, look: _Look, key: Key) -> ChunkState:
        chunk = self._primary.get(key)
        if chunk is not None:
            if chunk.ready:
                return ChunkState.HIT
            _join(self._awaiting, key, look.mine)
            return ChunkState.PENDING
        asker = look.asker
        left = asker.tiers & ~asker.absent.get(key, 0)
        present = asker.present.get(key, 0)
        if left & present:
            there = self._take(look, key, left & present)
            if there is not ChunkState.MISS:
                return there
        return self._ask(look, key, left & (asker.worth or 0) & ~present)

    def _take(self, look: _Look, key: Key, there: int) -> ChunkState:
        """Have the first of the tiers that have it give it."""
        for number in _bits(there):
            tier = self._tiers[number]
            full = tier.reads_left <= look.taken.get(number, 0)
            if not tier.trusted or (full and tier.overdue):
                look.asker.lacks(key, number)  # it will not give it
            elif full or not self._left:
                look.cut = True
                return ChunkState.RETRY
            else:
                self._left -= 1
                look.taken[number] = look.taken.get(number, 0) + 1
                look.promote.append((key, number))
                return ChunkState.PENDING
        return ChunkState.MISS

    def _ask(self, look: _Look, key: Key, tiers: int) -> ChunkState:
        """Have all of these asked. Whether to wait for one of them."""
        state = ChunkState.MISS
        for number in _bits(tiers):
            tier = self._tiers[number]
            if key in tier.asked:
                _join(tier.asked, key, look.mine)
            elif not self._may_ask(look, number):
                continue
            elif not self._left or tier.finds_left <= 0:
                look.cut = True
            else:
                self._left -= 1
                tier.asked[key] = look.mine
                tier.to_find.append(key)
            if tier.trusted:
                state = ChunkState.RETRY
        return state

    def _may_ask(self, look: _Look, number: int) -> bool:
        if number not in look.may_ask:
            look.may_ask[number] = self._tiers[number].may_ask(look.now)
        return look.may_ask[number]

    def _promote(self, look: _Look, keys: Sequence[Key]) -> int:
        """Rows for what is to be promoted, the earliest first; how many there were."""
        if not look.promote:
            return 0
        chunks = self._primary.fill([key for key, _ in look.promote], keep=keys)
        self.no_room += len(look.promote) - len(chunks)
        sources, (request_id,) = look.asker.sources, look.mine
        for chunk, (key, number) in zip(chunks, look.promote, strict=False):
            tier = self._tiers[number]
            tier.to_read.setdefault(request_id, []).append(chunk)
            tier.num_reading += 1
            self._awaiting[key] = look.mine
            sources[key] = number
        return len(chunks)

    # ---- what became of it ----------------------------------------------------------------------

    def answered(self, number: int, keys: Sequence[Key], good: Sequence[bool], askers: Askers, now: float) -> None:
        """A tier said which of the keys it has, or (all bad) did not say in time."""
        tier = self._tiers[number]
        waiters: tuple[str, ...] = ()
        known: list[Asker] = []
        for key, there in zip(keys, good, strict=True):
            names = tier.asked.pop(key, ())
            if names is not waiters:
                waiters, known = names, askers.some(names)
            for asker in known:
                if there:
                    asker.learns(key, number, now)
                else:
                    asker.lacks(key, number)

    def came(self, key: Key, askers: Askers, now: float) -> None:
        """A chunk that was on its way is there."""
        for asker in askers.some(self._awaiting.pop(key, ())):
            asker.heard = now

    def lost(self, key: Key, number: int, askers: Askers) -> None:
        """A chunk will not come from that tier: it is computed, or comes from another, but is not asked for there again
        (TIR-16)."""
        for asker in askers.some(self._awaiting.pop(key, ())):
            asker.sources.pop(key, None)
            asker.lacks(key, number)


def _join(waiting: dict[Key, tuple[str, ...]], key: Key, mine: tuple[str, ...]) -> None:
    names = waiting.get(key)
    if names is None:
        waiting[key] = mine
    elif mine[0] not in names:
        waiting[key] = names + mine


def _bits(mask: int) -> Iterator[int]:
    """The numbers in a set of tiers, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
