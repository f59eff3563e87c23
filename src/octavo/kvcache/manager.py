"""Give blocks to requests, find what was computed before, and take blocks back.

Promises: no block is leaked or owned twice; a reservation that is cancelled leaves no trace; what
`commit` was told is certain can be found by the next request.
Does not know: steps, budgets, tensors, or why a request stops.

Life of a request here: `match` -> `reserve(hit=...)` -> `commit` / `reserve` ... -> `release`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from octavo.base.kvspec import KVLayout
from octavo.kvcache.hashing import BlockHash, group_key
from octavo.kvcache.policies import NULL_BLOCK, PolicyRegistry, block_policies, longest_common_hit
from octavo.kvcache.pool import BlockPool, Taken
from octavo.kvcache.prefix import CacheEvent, EventLog, NoEvents, PrefixIndex
from octavo.kvcache.tables import LookupReason, PrefixHit, Reservation, Tables, split_by

__all__ = ["KVCacheManager", "KVRequest", "KVStats", "LookupReason", "PrefixHit", "Reservation"]


class KVRequest(Protocol):
    """What the manager needs of a request, by shape."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, prompt and output."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the blocks, or will be by steps already planned.

        Windows move by this count, so of guessed tokens only accepted ones may be in it: below what it
        once was, it falls only by `release`.
        """

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """Hashes of the full blocks of `hasher_block_size` known tokens."""

    @property
    def reads_prefix_cache(self) -> bool:
        """False: this request is given no hits; others may still hit what it computes."""


class KVStats(msgspec.Struct, frozen=True):
    """Figures of one moment; counters only grow, but for what a cancelled reservation had counted."""

    num_total_blocks: int
    num_free_blocks: int
    num_cached_blocks: int  # findable, held or free
    num_requests: int
    usage: float  # 0..1
    prefix_queries: int  # tokens of prompts that were looked up, each prompt once
    prefix_hits: int  # those of them that were found
    prefix_resumed: int  # tokens that requests which had lost their blocks found again
    prefix_shared: int  # tokens that further answers to a prompt took from the first
    evictions: int  # blocks whose content was given up for new content


_NOT_COMMITTED: tuple[int, tuple[BlockHash, ...]] = (0, ())


class KVCacheManager:
    """All block bookkeeping of one engine, across groups.

    Owns: the pool, the prefix index, every request's block tables, and the blocks that wait behind a fence.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        hasher_block_size: int,
        enable_prefix_caching: bool,
        watermark_blocks: int,
        max_model_len: int,
        max_batched_tokens: int,
        record_events: bool = False,
        policies: PolicyRegistry | None = None,
    ) -> None:
        """Raises `ValueError` for a spec without policy, or a block size that hashes cannot be joined to."""
        registry = block_policies() if policies is None else policies
        self._policies = tuple(registry.policy(g.spec) for g in layout.groups)
        for policy in self._policies:
            if policy.block_size % hasher_block_size:
                raise ValueError(
                    f"a KV block of {policy.block_size} tokens is not a multiple of the {hasher_block_size} that are "
                    "hashed together; hash by a common divisor of the groups' block sizes"
                )
        self._strides = tuple(p.block_size // hasher_block_size for p in self._policies)
        self._hasher_block_size = hasher_block_size
        self._caching = enable_prefix_caching and bool(self._policies)
        self._watermark = watermark_blocks
        self._max_model_len = max_model_len
        self._max_batched_tokens = max_batched_tokens
        self._pool = BlockPool(layout.num_blocks)
        self._index = PrefixIndex(EventLog() if record_events else NoEvents())
        self._tables: dict[str, Tables] = {}
        self._fenced: dict[int, list[int]] = {}
        self._next_to_retire = 0
        self._resets = 0
        self._owed = 0  # blocks that admitted requests have yet to take for the tokens they came with
        self._queries = self._evictions = 0
        self._found = dict.fromkeys(LookupReason, 0)
        self._no_blocks: tuple[tuple[int, ...], ...] = ((),) * len(self._policies)
        self.num_total_blocks = layout.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that may be taken now, those with findable content included."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Share of blocks held by requests, 0..1; findable but free blocks are not used."""
        return 1.0 - self._pool.num_free / self.num_total_blocks if self.num_total_blocks else 0.0

    # ---- reading -----------------------------------------------------------------------------

    def match(self, req: KVRequest, lookup: LookupReason = LookupReason.FRESH) -> PrefixHit:
        """Longest prefix found in every group, at most `num_tokens - 1` tokens (SCH-23, SCH-26). Changes nothing.

        `lookup` says which figure counts the hit when it is used.
        """
        if not self._caching or not req.reads_prefix_cache:
            return PrefixHit(0, self._no_blocks)
        limit = max(0, req.num_tokens - 1)
        num_tokens, blocks = longest_common_hit(
            self._policies, self._strides, req.block_hashes, self._index.find, limit
        )
        return PrefixHit(num_tokens, blocks, self._index.version, lookup)

    def is_findable(self, block: BlockHash) -> bool:
        """True when the first group has this block, so that a request which begins with it would find it."""
        return self._caching and self._index.find(block, 0) is not None

    def blocks(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        """The request's block table by group; empty tuples for an unknown id."""
        tables = self._tables.get(request_id)
        return self._no_blocks if tables is None else tuple(map(tuple, tables.blocks))

    # ---- taking and giving back --------------------------------------------------------------

    def reserve(
        self,
        req: KVRequest,
        num_new_tokens: int,
        *,
        hit: PrefixHit | None = None,
        external_tokens: int = 0,
        lookahead_tokens: int = 0,
        admission: bool = False,
        beside_others: bool = False,
    ) -> Reservation | None:
        """Blocks for `num_new_tokens` after what is computed; None when there is no room (SCH-24).

        For a request without blocks, "computed" is `hit.num_tokens + external_tokens` (its own
        `num_computed_tokens` is not looked at): `external_tokens` follow the local hit. For one with
        blocks it is `num_computed_tokens`, and neither `hit` nor `external_tokens` may be given.
        `admission`: the whole sequence must fit, not only this chunk, beside what those admitted before
        have yet to take for theirs. `beside_others`: keep the watermark.

        Blocks that a window has passed are given back in any case, and stay so when the reservation is
        refused or cancelled. Raises `RuntimeError` for a hit that no longer stands (match again).
        """
        tables = self._tables.get(req.request_id)
        computed = req.num_computed_tokens
        if (
            tables is not None
            and computed < tables.expires_at
            and computed + num_new_tokens + lookahead_tokens <= tables.capacity
            and not admission
            and hit is None
        ):
            return tables.nothing
        if tables is None:
            computed = external_tokens if hit is None else hit.num_tokens + external_tokens
        elif hit is not None or external_tokens:
            raise RuntimeError(f"request {req.request_id} has blocks already: a hit belongs to its admission")
        elif computed >= tables.expires_at:
            self._give(tables.expire(self._policies, computed))
        total = computed + num_new_tokens
        total = max(total, min(total + lookahead_tokens, self._max_model_len))
        whole = min(max(req.num_tokens, total), self._max_model_len) if admission else 0
        spare = self._watermark if beside_others else 0
        if tables is None:
            return self._admit(req, hit, computed, total, whole, spare)
        return self._grow(tables, total, whole, spare)

    def cancel(self, res: Reservation) -> None:
        """Give back what this reservation took; to be called before its step is submitted or committed.

        Cancelled in reverse order, reservations leave the pool and the index as they were; in another
        order the same blocks are free and findable, and only the order of the free list may differ.
        Raises `RuntimeError` when the request has reserved more, committed these blocks, or is gone.
        """
        tables = self._tables.get(res.request_id)
        if tables is None:
            raise RuntimeError(f"request {res.request_id} was released: nothing of its reservation is left to cancel")
        if res is tables.nothing:
            return
        tables.drop_tail(res.new_blocks)
        keeps = res.lost if res.resets == self._resets else ()
        for block, key in keeps:
            self._index.add(key, block)
        self._evictions -= len(res.lost)
        self._pool.untake(res.taken, (block for block, _ in keeps))
        for held in reversed(res.held):
            self._pool.unhold(held, held.block in self._index)
        self._owed += res.owed - tables.owed
        tables.owed = res.owed
        if res.created:
            del self._tables[res.request_id]
            self._queries -= res.queried
            self._found[res.lookup] -= res.found
        tables.settle(self._policies)

    def commit(self, req: KVRequest, num_certain_tokens: int) -> tuple[int, tuple[BlockHash, ...]]:
        """Make full blocks of the first `num_certain_tokens` findable (SCH-25).

        Gives the hash-chain blocks that became certain: the index in the request of the first, and their
        hashes (with groups of larger blocks, some may not be findable in every group yet).
        """
        tables = self._tables.get(req.request_id)
        if tables is None or num_certain_tokens < tables.commit_at:
            return _NOT_COMMITTED
        hashes = req.block_hashes
        certain = min(num_certain_tokens // self._hasher_block_size, len(hashes))
        for group, (row, stride) in enumerate(zip(tables.blocks, self._strides, strict=True)):
            start, stop = tables.committed[group], min(certain // stride, len(row))
            for i in range(start, stop):
                if row[i] != NULL_BLOCK:
                    self._index.add(group_key(hashes[(i + 1) * stride - 1], group), row[i])
            tables.committed[group] = max(start, stop)
        tables.settle(self._policies)
        first, tables.reported = tables.reported, max(tables.reported, certain)
        return first, tuple(hashes[first : tables.reported])

    def release(self, request_id: str, *, after: int | None = None) -> None:
        """Give back all blocks, tail first; with `after`, once `retire(after)` was called. Unknown ids are ignored."""
        tables = self._tables.pop(request_id, None)
        if tables is None:
            return
        self._owed -= tables.owed
        blocks = tables.tail_first(self._policies)
        if after is None or after < self._next_to_retire:
            self._give(blocks)
        else:
            self._fenced.setdefault(after, []).extend(blocks)

    def retire(self, seq: int) -> None:
        """Steps up to `seq` have been processed: nothing writes any more to blocks they used (SCH-32)."""
        self._next_to_retire = max(self._next_to_retire, seq + 1)
        if self._fenced:
            for fence in sorted(s for s in self._fenced if s <= seq):
                self._give(self._fenced.pop(fence))

    # ---- the cache as a whole ----------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Forget all content, also what running requests hold; True when no old content can be hit (SCH-28).

        Running requests keep their blocks and commit no more: their later blocks build on old content.
        Nothing needs to be preempted for this, so it is always done.
        """
        self._index.clear()
        self._pool.forget()
        self._resets += 1
        for tables in self._tables.values():
            tables.stale = True
            tables.settle(self._policies)
        return True

    def take_events(self) -> tuple[CacheEvent, ...]:
        """What became findable or stopped being so since the last call; empty unless `record_events` (SCH-27)."""
        return self._index.take_events()

    def stats(self) -> KVStats:
        """Figures for metrics."""
        return KVStats(
            num_total_blocks=self.num_total_blocks,
            num_free_blocks=self._pool.num_free,
            num_cached_blocks=len(self._index),
            num_requests=len(self._tables),
            usage=self.usage,
            prefix_queries=self._queries,
            prefix_hits=self._found[LookupReason.FRESH],
            prefix_resumed=self._found[LookupReason.RESUMED],
            prefix_shared=self._found[LookupReason.SIBLING],
            evictions=self._evictions,
        )

    def check(self) -> None:
        """Recount everything; raise `RuntimeError` on the first broken invariant. For tests and debug mode."""
        self._pool.check()
        self._index.check()
        holders = Counter(b for blocks in self._fenced.values() for b in blocks)
        for tables in self._tables.values():
            tables.check(self._policies)
            holders.update(tables.held())
        for block in range(1, self.num_total_blocks + 1):
            if holders[block] != self._pool.holders(block):
                raise RuntimeError(
                    f"block {block} has {self._pool.holders(block)} holders on record and {holders[block]} in fact"
                )
        if any(b not in self._index for b in self._pool.kept()):
            raise RuntimeError("a free block is kept for content that nobody can find")
        kept = len(self._pool.kept())
        if kept != sum(self._pool.is_free(b) for b in self._index.items()):
            raise RuntimeError("a free block with findable content is not among the kept")
        if self._owed != sum(tables.owed for tables in self._tables.values()):
            raise RuntimeError("the blocks owed to admitted requests do not add up")
        if any(fence < self._next_to_retire for fence in self._fenced):
            raise RuntimeError("blocks still wait behind a fence that has been passed")

    # ---- steps of `reserve` ------------------------------------------------------------------

    def _check_hit(self, req: KVRequest, hit: PrefixHit) -> None:
        """Raise `RuntimeError` when a block of the hit holds something else by now."""
        if hit.version == self._index.version:
            return
        for group, (row, stride) in enumerate(zip(hit.blocks, self._strides, strict=True)):
            for i, block in enumerate(row):
                key = group_key(req.block_hashes[(i + 1) * stride - 1], group)
                if block != NULL_BLOCK and self._index.key_of(block) != key:
                    raise RuntimeError(f"the prefix hit of request {req.request_id} no longer stands; match it again")

    def _admit(
        self, req: KVRequest, hit: PrefixHit | None, computed: int, total: int, whole: int, spare: int
    ) -> Reservation | None:
        """First blocks of a request: hits, null blocks where windows have passed `computed`, and new ones."""
        if hit is not None:
            self._check_hit(req, hit)
        rows = self._rows(hit, computed, total)
        hits = [[b for b in row if b] for row in rows]
        in_use = [sum(not self._pool.is_free(b) for b in row) for row in hits]
        num_new = sum(row.count(None) for row in rows)
        need = num_new + sum(map(len, hits)) - sum(in_use)
        if whole:
            need = max(need, self._whole_need(whole, in_use)) + self._owed
        if need + spare > self._pool.num_free:
            return None
        # Hits are held first, so that none of them is taken for new content.
        held = tuple([self._pool.hold(b) for row in hits for b in row])
        taken, lost = self._take(num_new)
        fresh = iter(taken.blocks)
        new_blocks = tuple([tuple([next(fresh) if b is None else b for b in row]) for row in rows])
        tables = Tables(req.request_id, len(self._policies), stale=not self._caching)
        self._tables[req.request_id] = tables
        tables.append(new_blocks)
        for group, policy in enumerate(self._policies):
            tables.passed[group] = min(policy.expired(computed).stop, len(tables.blocks[group]))
        self._owe(tables, whole)
        queried = found = 0
        lookup = LookupReason.FRESH
        if hit is not None:
            tables.adopt([len(row) for row in hit.blocks], hit.num_tokens // self._hasher_block_size)
            if self._caching and req.reads_prefix_cache:
                lookup, found = hit.lookup, hit.num_tokens
                queried = req.num_tokens if lookup is LookupReason.FRESH else 0
        self._queries += queried
        self._found[lookup] += found
        tables.settle(self._policies)
        return Reservation(
            req.request_id, new_blocks, True, queried, found, lookup, taken, held, lost, resets=self._resets
        )

    def _rows(self, hit: PrefixHit | None, computed: int, total: int) -> list[list[int | None]]:
        """What each group's table would start with: a hit block, a null block, or None for one to take."""
        rows: list[list[int | None]] = []
        for group, policy in enumerate(self._policies):
            row: list[int | None] = [*hit.blocks[group]] if hit is not None else []
            row.extend([None] * (policy.blocks_for(total) - len(row)))
            for i in policy.expired(computed):
                if i < len(row):
                    row[i] = NULL_BLOCK
            rows.append(row)
        return rows

    def _grow(self, tables: Tables, total: int, whole: int, spare: int) -> Reservation | None:
        """More blocks for a request that has some, for `total` tokens in all."""
        counts = [p.blocks_for(total) - len(row) for p, row in zip(self._policies, tables.blocks, strict=True)]
        counts = [c if c > 0 else 0 for c in counts]
        need = num_new = sum(counts)
        if whole:
            need = max(need, self._whole_need(whole, tables.live())) + self._owed - tables.owed
        if need + spare > self._pool.num_free:
            return None
        if not num_new:
            return tables.nothing
        taken, lost = self._take(num_new)
        new_blocks = (taken.blocks,) if len(counts) == 1 else split_by(taken.blocks, counts)
        tables.append(new_blocks)
        tables.measure(self._policies)
        owed = tables.owed
        if whole:
            self._owe(tables, whole)
        elif owed:
            fall = min(owed, num_new)
            tables.owed -= fall
            self._owed -= fall
        return Reservation(
            tables.nothing.request_id, new_blocks, taken=taken, lost=lost, owed=owed, resets=self._resets
        )

    def _whole_need(self, whole: int, had: Sequence[int]) -> int:
        """Blocks that a sequence of `whole` tokens needs in the end beyond those it `had`, by group."""
        most = [policy.most_blocks(whole, self._max_batched_tokens) for policy in self._policies]
        return sum([max(0, m - h) for m, h in zip(most, had, strict=True)])

    def _owe(self, tables: Tables, whole: int) -> None:
        """Note what the request will yet take for `whole` tokens, so that nobody else is admitted to it."""
        self._owed -= tables.owed
        tables.owed = self._whole_need(whole, tables.live()) if whole else 0
        self._owed += tables.owed

    def _take(self, count: int) -> tuple[Taken, tuple[tuple[int, bytes], ...]]:
        """Blocks for new content, and what findable content that cost."""
        taken = self._pool.take(count)
        evicted = taken.evicted
        if not evicted:
            return taken, ()
        self._evictions += len(evicted)
        return taken, tuple([(b, self._index.remove(b)) for b in evicted])

    def _give(self, blocks: Iterable[int]) -> None:
        """One holder less for each of these blocks."""
        for block in blocks:
            self._pool.release(block, block in self._index)
