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
from octavo.kvcache.policies import NULL_BLOCK, PolicyRegistry, builtin_policies, longest_common_hit
from octavo.kvcache.pool import BlockPool
from octavo.kvcache.prefix import CacheEvent, EventLog, NoEvents, PrefixIndex
from octavo.kvcache.tables import Reservation, Tables

__all__ = ["KVCacheManager", "KVRequest", "KVStats", "PrefixHit", "Reservation"]


class KVRequest(Protocol):
    """What the manager needs of a request, by shape."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, prompt and output."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the blocks (or will be, by steps already planned). Falls only by `release`."""

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """Hashes of the full blocks of `hasher_block_size` known tokens."""

    @property
    def reads_prefix_cache(self) -> bool:
        """False: this request is given no hits; others may still hit what it computes."""


class PrefixHit(msgspec.Struct, frozen=True):
    """The longest prefix that all groups have: `blocks[g]` is the table's start, null block 0 where not needed.

    `version` says of which state of the prefix index this is true.
    """

    num_tokens: int
    blocks: tuple[tuple[int, ...], ...]
    version: int = 0


class KVStats(msgspec.Struct, frozen=True):
    """Figures of one moment; counters only grow, but for what a cancelled reservation had counted."""

    num_total_blocks: int
    num_free_blocks: int
    num_cached_blocks: int  # findable, held or free
    num_requests: int
    usage: float  # 0..1
    prefix_queries: int  # tokens looked up by admitted requests
    prefix_hits: int  # tokens found by admitted requests
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
        registry = builtin_policies() if policies is None else policies
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
        self._retired = 0
        self._resets = 0
        self._queries = self._hits = self._evictions = 0
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

    def match(self, req: KVRequest) -> PrefixHit:
        """Longest prefix found in every group, at most `num_tokens - 1` tokens (SCH-23, SCH-26). Changes nothing."""
        if not self._caching or not req.reads_prefix_cache:
            return PrefixHit(0, self._no_blocks)
        limit = max(0, req.num_tokens - 1)
        num_tokens, blocks = longest_common_hit(
            self._policies, self._strides, req.block_hashes, self._index.find, limit
        )
        return PrefixHit(num_tokens, blocks, self._index.version)

    def blocks(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        """The request's block table by group; empty tuples for an unknown id."""
        tables = self._tables.get(request_id)
        return self._no_blocks if tables is None else tuple(map(tuple, tables.blocks))

    def common_prefix_blocks(self, request_ids: Sequence[str]) -> tuple[int, ...]:
        """By group, how many leading blocks are the same in all these requests; null blocks end the count."""
        tables = [self._tables.get(i) for i in request_ids]
        return tuple(
            _common_start([[] if t is None else t.blocks[group] for t in tables])
            for group in range(len(self._policies))
        )

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
        `admission`: the whole sequence must fit, not only this chunk. `beside_others`: keep the watermark.

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
        created = tables is None
        if tables is None:
            tables = Tables(req.request_id, len(self._policies), stale=not self._caching)
            computed = external_tokens if hit is None else hit.num_tokens + external_tokens
            if hit is not None:
                self._check_hit(req, hit)
        elif hit is not None or external_tokens:
            raise RuntimeError(f"request {req.request_id} has blocks already: a hit belongs to its admission")
        else:
            self._give(tables.expire(self._policies, computed))
            tables.settle(self._policies)
        total = computed + num_new_tokens
        total = max(total, min(total + lookahead_tokens, self._max_model_len))
        rows = self._rows(tables, hit, computed, total)
        need = self._need(tables, rows, max(req.num_tokens, total) if admission else None)
        if need + (self._watermark if beside_others else 0) > self._pool.num_free:
            return None
        reservation = self._take(tables, rows, created)
        if created:
            reservation = self._enter(req, tables, reservation, hit, computed)
        tables.settle(self._policies)
        return reservation

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
        if res.created:
            del self._tables[res.request_id]
            self._queries -= res.queried
            self._hits -= res.found
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
        blocks = tables.tail_first(self._policies)
        if after is None or after <= self._retired:
            self._give(blocks)
        else:
            self._fenced.setdefault(after, []).extend(blocks)

    def retire(self, seq: int) -> None:
        """Steps up to `seq` have been processed: nothing writes any more to blocks they used (SCH-32)."""
        self._retired = max(self._retired, seq)
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
            prefix_hits=self._hits,
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
        if any(fence <= self._retired for fence in self._fenced):
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

    def _rows(self, tables: Tables, hit: PrefixHit | None, computed: int, total: int) -> list[list[int | None]]:
        """What each group's table would grow by: a hit block, a null block, or None for one to take."""
        rows: list[list[int | None]] = []
        for group, policy in enumerate(self._policies):
            have = len(tables.blocks[group])
            row: list[int | None] = [*hit.blocks[group]] if hit is not None else []
            row.extend([None] * (policy.blocks_for(total) - have - len(row)))
            gone = policy.expired(computed)
            for i in range(max(gone.start - have, 0), min(gone.stop - have, len(row))):
                row[i] = NULL_BLOCK
            rows.append(row)
        return rows

    def _need(self, tables: Tables, rows: Sequence[Sequence[int | None]], whole: int | None) -> int:
        """Free blocks this takes now; with `whole`, or more if the whole sequence of so many tokens holds more."""
        need = need_whole = 0
        for group, (policy, row) in enumerate(zip(self._policies, rows, strict=True)):
            hits = [b for b in row if b]
            in_use = sum(not self._pool.is_free(b) for b in hits)
            need += row.count(None) + len(hits) - in_use
            if whole is not None:
                most = policy.most_blocks(min(whole, self._max_model_len), self._max_batched_tokens)
                need_whole += max(0, most - tables.live(group) - in_use)
        return max(need, need_whole)

    def _take(self, tables: Tables, rows: Sequence[Sequence[int | None]], created: bool) -> Reservation:
        """Take the blocks and append them: hits first, so that none of them is taken for new content."""
        held = tuple(self._pool.hold(b) for row in rows for b in row if b)
        taken = self._pool.take(sum(row.count(None) for row in rows))
        lost = tuple((b, self._index.remove(b)) for b in taken.evicted)
        self._evictions += len(lost)
        fresh = iter(taken.blocks)
        new_blocks = tuple(tuple(next(fresh) if b is None else b for b in row) for row in rows)
        if not created and not any(new_blocks):
            return tables.nothing
        tables.append(new_blocks)
        return Reservation(
            tables.nothing.request_id, new_blocks, created, taken=taken, held=held, lost=lost, resets=self._resets
        )

    def _enter(
        self, req: KVRequest, tables: Tables, res: Reservation, hit: PrefixHit | None, computed: int
    ) -> Reservation:
        """Put a request on the books with its first blocks."""
        self._tables[req.request_id] = tables
        for group, policy in enumerate(self._policies):
            tables.passed[group] = min(policy.expired(computed).stop, len(tables.blocks[group]))
        if hit is None:
            return res
        tables.from_hit = [len(row) for row in hit.blocks]
        tables.committed = tables.from_hit.copy()
        tables.reported = hit.num_tokens // self._hasher_block_size
        if not self._caching or not req.reads_prefix_cache:
            return res
        self._queries += req.num_tokens
        self._hits += hit.num_tokens
        return msgspec.structs.replace(res, queried=req.num_tokens, found=hit.num_tokens)

    def _give(self, blocks: Iterable[int]) -> None:
        """One holder less for each of these blocks."""
        for block in blocks:
            self._pool.release(block, block in self._index)


def _common_start(rows: Sequence[Sequence[int]]) -> int:
    """How many leading entries are equal in all rows and not null."""
    if not rows:
        return 0
    first = rows[0]
    count = next((i for i, b in enumerate(first) if b == NULL_BLOCK), len(first))
    for row in rows[1:]:
        if row[:count] != first[:count]:
            count = next((i for i, (a, b) in enumerate(zip(row, first, strict=False)) if a != b), min(len(row), count))
        if not count:
            break
    return count
