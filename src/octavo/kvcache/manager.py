"""Give blocks to requests, find what was computed before, and take blocks back.

Promises: no block is leaked or owned twice; a reservation that is cancelled leaves no trace; what
`commit` was told is certain can be found by the next request.
Does not know: steps, budgets, tensors, or why a request stops.

Life of a request here: `match` -> `reserve(hit=...)` -> `commit` / `reserve` ... -> `release`.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from octavo.base.kvspec import KVLayout
from octavo.kvcache.hashing import BlockHash
from octavo.kvcache.prefix import CacheEvent


class KVRequest(Protocol):
    """What the manager needs of a request, by shape."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, prompt and output."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the blocks (or will be, by steps already planned)."""

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """Hashes of the full blocks of `hasher_block_size` known tokens."""

    @property
    def reads_prefix_cache(self) -> bool: ...


class PrefixHit(msgspec.Struct, frozen=True):
    """The longest prefix that all groups have: `blocks[g]` is the table's start, null block 0 where not needed."""

    num_tokens: int
    blocks: tuple[tuple[int, ...], ...]


class Reservation(msgspec.Struct, frozen=True):
    """Blocks one `reserve` gave. `new_blocks[g]` is to be appended to the block table of group g."""

    request_id: str
    new_blocks: tuple[tuple[int, ...], ...]


class KVStats(msgspec.Struct, frozen=True):
    """Figures of one moment; counters only grow."""

    num_total_blocks: int
    num_free_blocks: int
    num_cached_blocks: int  # findable, held or free
    num_requests: int
    usage: float  # 0..1
    prefix_queries: int  # tokens looked up by admitted requests
    prefix_hits: int  # tokens found by admitted requests
    evictions: int  # blocks whose content was given up for new content


class KVCacheManager:
    """All block bookkeeping of one engine, across groups."""

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
    ) -> None:
        raise NotImplementedError

    num_total_blocks: int  # without the null block

    @property
    def num_free_blocks(self) -> int:
        """Blocks that may be taken now, those with findable content included."""
        raise NotImplementedError

    @property
    def usage(self) -> float:
        """Share of blocks held by requests, 0..1; findable but free blocks are not used."""
        raise NotImplementedError

    def match(self, req: KVRequest) -> PrefixHit:
        """Longest prefix found in every group, at most `num_tokens - 1` tokens (SCH-23, SCH-26). Changes nothing."""
        raise NotImplementedError

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
        """
        raise NotImplementedError

    def cancel(self, res: Reservation) -> None:
        """Give back what this reservation took; to be called before its step is submitted or committed."""
        raise NotImplementedError

    def commit(self, req: KVRequest, num_certain_tokens: int) -> tuple[int, tuple[BlockHash, ...]]:
        """Make full blocks of the first `num_certain_tokens` findable; (index of the first, hashes) of the new ones."""
        raise NotImplementedError

    def release(self, request_id: str, *, after: int | None = None) -> None:
        """Give back all blocks, tail first; with `after`, once `retire(after)` was called. Unknown ids are ignored."""
        raise NotImplementedError

    def retire(self, seq: int) -> None:
        """Steps up to `seq` have been processed: nothing writes any more to blocks they used (SCH-32)."""
        raise NotImplementedError

    def blocks(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        """The request's block table by group; empty tuples for an unknown id."""
        raise NotImplementedError

    def common_prefix_blocks(self, request_ids: Sequence[str]) -> tuple[int, ...]:
        """By group, how many leading blocks are the same in all these requests."""
        raise NotImplementedError

    def reset_prefix_cache(self) -> bool:
        """Forget all content, also what running requests hold; True when no old content can be hit (SCH-28)."""
        raise NotImplementedError

    def take_events(self) -> tuple[CacheEvent, ...]:
        """What became findable or stopped being so since the last call; empty unless `record_events`."""
        raise NotImplementedError

    def stats(self) -> KVStats:
        """Figures for metrics."""
        raise NotImplementedError

    def check(self) -> None:
        """Recount everything; raise `RuntimeError` on the first broken invariant. For tests and debug mode."""
        raise NotImplementedError
