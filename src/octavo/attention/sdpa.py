"""The reference backend: torch's scaled dot-product attention over gathered blocks, on any device.

Promises: right for every need of plain decoder models; what it never reads into a result: tokens that a window hides,
and whatever lies in a block beyond a row's sequence (it may be NaN).
Does not know: how to be fastest; other backends are tested against this one.

How: rows with one new token are gathered together, padded to the longest of a bucket of like lengths. Other rows are
computed one by one; a row without context reads this step's keys directly, the others gather their blocks first.
Long rows go in tiles of queries, each against the keys that it can see.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from octavo.attention.api import CPU, AttentionNeed, Capabilities
from octavo.attention.batch import AttentionBatch
from octavo.base.kvspec import KVSpec, SlidingWindowSpec
from octavo.config.facts import DeviceFacts
from octavo.forward.context import LayerBinding
from octavo.ops.registry import Ops

TILE: Final = 256  # queries computed against one mask
BUCKET_TOKENS: Final = 1 << 16  # keys gathered at once for decode rows, padding included
BUCKET_WASTE: Final = 1.25  # longest over shortest row of a bucket, in blocks
BUCKET_SLACK: Final = 128  # tokens by which rows of a bucket may always differ


class Tile(NamedTuple):
    """Queries `first .. stop` of a row, against its gathered keys `key_first .. key_stop`."""

    first: int
    stop: int
    key_first: int
    key_stop: int
    mask: torch.Tensor | None  # [queries, keys], added to the scores; None: plain causal, no context


@dataclass(frozen=True, slots=True)
class LongRow:
    """A row with several new tokens, at tokens `start .. stop` of the step."""

    start: int
    stop: int
    blocks: torch.Tensor | None  # to gather; None: there is no context, so the step's own keys are all
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows with one new token each, padded to `length` keys."""

    tokens: torch.Tensor | None  # [N], their places in the step; None: all tokens of the step, in order
    blocks: torch.Tensor  # [N * blocks a row]
    length: int  # keys a row, padding included
    stale: torch.Tensor  # places in [N * length] that are not the row's
    mask: torch.Tensor  # [N, 1, 1, length], added to the scores


class View(NamedTuple):
    """The step as layers with one window see it."""

    long_rows: tuple[LongRow, ...]
    buckets: tuple[Bucket, ...]

    @property
    def whole(self) -> Bucket | None:
        """The bucket that is all there is to the step, if it is one."""
        one = self.buckets[0] if len(self.buckets) == 1 else None
        return one if one is not None and one.tokens is None else None


class SdpaPlan:
    """One step of one group. Layers of one group may have different windows: each gets its own view, made once.

    Owns: the views made so far.
    """

    def __init__(self, batch: AttentionBatch, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._planner = _Planner(batch, block_size, dtype, device)
        self._views: dict[int | None, View] = {}
        self.num_tokens = batch.num_tokens

    def view(self, window: int | None) -> View:
        """The plan for layers with this window."""
        view = self._views.get(window)
        if view is None:
            view = self._views[window] = self._planner.view(window)
        return view


@dataclass(frozen=True, slots=True)
class SdpaBuilder:
    """Plans steps of one KV group."""

    spec: KVSpec
    device: torch.device

    def plan(self, batch: AttentionBatch) -> SdpaPlan:
        plan = SdpaPlan(batch, self.spec.block_size, getattr(torch, self.spec.dtype), self.device)
        plan.view(self.spec.window if isinstance(self.spec, SlidingWindowSpec) else None)
        return plan


@dataclass(frozen=True, slots=True)
class _Planner:
    """Turns lengths and block tables into what the layers of one window read."""

    batch: AttentionBatch
    block_size: int
    dtype: torch.dtype
    device: torch.device

    def view(self, window: int | None) -> View:
        single = self.batch.query_lens == 1
        long_rows = tuple(self._long_row(int(row), window) for row in np.flatnonzero(~single))
        return View(long_rows, tuple(self._buckets(np.flatnonzero(single), window)))

    def _long_row(self, row: int, window: int | None) -> LongRow:
        batch, size = self.batch, self.block_size
        start, count = int(batch.query_starts[row]), int(batch.query_lens[row])
        context = int(batch.context_lens[row])
        if context == 0 and (window is None or window >= count):
            return LongRow(start, start + count, None, (Tile(0, count, 0, count, None),))
        oldest = 0 if window is None else max(0, context - window + 1)
        first_block = oldest // size
        gathered_from = first_block * size if context else 0
        tiles = tuple(
            self._tile(first, min(first + TILE, count), context, gathered_from, window)
            for first in range(0, count, TILE)
        )
        blocks = None
        if context:
            last_block = -(-(context + count) // size)
            blocks = self._tensor(batch.block_table[row, first_block:last_block].astype(np.int64))
        return LongRow(start, start + count, blocks, tiles)

    def _tile(self, first: int, stop: int, context: int, gathered_from: int, window: int | None) -> Tile:
        queries = np.arange(context + first, context + stop)
        oldest = 0 if window is None else max(0, context + first - window + 1)
        keys = np.arange(oldest, context + stop)
        seen = keys[None, :] <= queries[:, None]
        if window is not None:
            seen &= keys[None, :] > queries[:, None] - window
        return Tile(first, stop, oldest - gathered_from, context + stop - gathered_from, self._mask(seen))

    def _buckets(self, rows: npt.NDArray[np.int64], window: int | None) -> "list[Bucket]":
        if not len(rows):
            return []
        size = self.block_size
        ends = self.batch.seq_lens[rows].astype(np.int64)
        starts = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
        first_blocks = starts // size
        num_blocks = -(-ends // size) - first_blocks
        longest = int(num_blocks.max())
        if len(rows) * longest * size <= BUCKET_TOKENS and int(num_blocks.min()) >= self._shortest(longest):
            return [self._bucket(rows, starts, ends, first_blocks, longest, whole=len(rows) == self.batch.num_tokens)]
        order = np.argsort(-num_blocks, kind="stable")
        rows, starts, ends = rows[order], starts[order], ends[order]
        first_blocks, num_blocks = first_blocks[order], num_blocks[order]
        out, at = [], 0
        while at < len(rows):
            longest = int(num_blocks[at])
            shortest = self._shortest(longest)
            room = max(1, BUCKET_TOKENS // (longest * size))
            stop = at + int(np.count_nonzero(num_blocks[at : at + room] >= shortest))
            part = slice(at, stop)
            out.append(self._bucket(rows[part], starts[part], ends[part], first_blocks[part], longest))
            at = stop
        return out

    def _shortest(self, longest: int) -> float:
        """Blocks that a row of a bucket must have beside one of `longest`."""
        return min(longest / BUCKET_WASTE, longest - BUCKET_SLACK / self.block_size)

    def _bucket(
        self,
        rows: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        first_blocks: npt.NDArray[np.int64],
        num_blocks: int,
        *,
        whole: bool = False,
    ) -> Bucket:
        size, table = self.block_size, self.batch.block_table
        columns = first_blocks[:, None] + np.arange(num_blocks)
        blocks = table[rows[:, None], np.minimum(columns, table.shape[1] - 1)].astype(np.int64)
        length = num_blocks * size
        positions = first_blocks[:, None] * size + np.arange(length)
        seen = (positions >= starts[:, None]) & (positions < ends[:, None])
        return Bucket(
            tokens=None if whole else self._tensor(self.batch.query_starts[rows].astype(np.int64)),
            blocks=self._tensor(blocks.reshape(-1)),
            length=length,
            stale=self._tensor(np.flatnonzero(~seen)),
            mask=self._mask(seen)[:, None, None, :],
        )

    def _mask(self, seen: npt.NDArray[np.bool_]) -> torch.Tensor:
        mask = torch.zeros(seen.shape, dtype=self.dtype)
        mask.masked_fill_(torch.from_numpy(~seen), float("-inf"))
        return mask.to(self.device)

    def _tensor(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)


class SdpaImpl:
    """One layer's attention.

    Owns: nothing.
    """

    def __init__(self, need: AttentionNeed, ops: Ops) -> None:
        self._need = need
        self._write = ops.write_kv

    def write(self, key: torch.Tensor, value: torch.Tensor, binding: LayerBinding, slot_mapping: torch.Tensor) -> None:
        self._write(key, value, binding.key, binding.value, slot_mapping)

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        binding: LayerBinding,
        plan: object,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        plan = cast(SdpaPlan, plan)
        view = plan.view(self._need.window)
        if view.whole is not None and len(query) == plan.num_tokens:
            return self._attend_bucket(view.whole, query, binding).view(query.shape)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if len(out) > plan.num_tokens:
            out[plan.num_tokens :] = 0
        for row in view.long_rows:
            self._long(row, query, key, value, binding, out)
        for bucket in view.buckets:
            self._bucket(bucket, query, binding, out)
        return out

    def _long(
        self,
        row: LongRow,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        binding: LayerBinding,
        out: torch.Tensor,
    ) -> None:
        if row.blocks is None:
            keys, values = (x[row.start : row.stop].transpose(0, 1) for x in (key, value))  # [G, S, D]
        else:
            keys, values = gather(binding.key, row.blocks), gather(binding.value, row.blocks)
        for tile in row.tiles:
            tokens = slice(row.start + tile.first, row.start + tile.stop)
            seen = slice(tile.key_first, tile.key_stop)
            out[tokens] = self._attend_long(query[tokens], keys[:, seen], values[:, seen], tile.mask)

    def _attend_long(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """query [n, H, D], keys and values [G, S, D] -> [n, H, D]. Heads of one group share keys without a copy."""
        num_tokens, num_heads, dim = query.shape
        shared = num_heads // keys.shape[0]
        wide = query.view(num_tokens, -1, shared, dim).permute(1, 2, 0, 3)  # [G, H / G, n, D]
        answer = F.scaled_dot_product_attention(
            wide,
            keys.unsqueeze(1).expand(-1, shared, -1, -1),
            values.unsqueeze(1).expand(-1, shared, -1, -1),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._need.scale,
        )
        return answer.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, dim)

    def _bucket(self, bucket: Bucket, query: torch.Tensor, binding: LayerBinding, out: torch.Tensor) -> None:
        if bucket.tokens is None:
            part = out[: len(bucket.mask)]
            part.copy_(self._attend_bucket(bucket, query[: len(part)], binding).view(part.shape))
        else:
            mine = query.index_select(0, bucket.tokens)
            out.index_copy_(0, bucket.tokens, self._attend_bucket(bucket, mine, binding).view(mine.shape))

    def _attend_bucket(self, bucket: Bucket, query: torch.Tensor, binding: LayerBinding) -> torch.Tensor:
        """query [N, H, D] of the bucket's rows -> [N, G, H / G, D]."""
        num_rows, num_heads, dim = query.shape
        num_groups = binding.key.shape[1]
        keys, values = (self._gather_bucket(cache, bucket, num_rows) for cache in (binding.key, binding.value))
        wide = query.view(num_rows, num_groups, num_heads // num_groups, dim)
        answer = F.scaled_dot_product_attention(wide, keys, values, attn_mask=bucket.mask, scale=self._need.scale)
        return answer.contiguous()

    @staticmethod
    def _gather_bucket(cache: torch.Tensor, bucket: Bucket, num_rows: int) -> torch.Tensor:
        """[N, G, length, D]; zero where a place is not the row's, since a hidden NaN would still spread."""
        flat = gather(cache, bucket.blocks).index_fill_(1, bucket.stale, 0)
        return flat.view(flat.shape[0], num_rows, bucket.length, -1).transpose(0, 1)


def gather(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The tokens of these blocks [n], in order, from a cache [blocks, G, size, D]: a new [G, n * size, D].

    Head by head, which copies whole blocks at once; one indexing of all heads is several times slower on a CPU.
    """
    _, num_groups, size, dim = cache.shape
    out = torch.empty((num_groups, len(blocks), size, dim), dtype=cache.dtype, device=cache.device)
    for head in range(num_groups):
        torch.index_select(cache[:, head], 0, blocks, out=out[head])
    return out.view(num_groups, -1, dim)


class SdpaBackend:
    """The reference backend.

    Owns: nothing.
    """

    name = "torch_sdpa"
    capabilities = Capabilities(
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64}),
        block_multiple=1,
        preferred_block_size=64,
        features=frozenset({"sliding window"}),
    )

    def objections(self, need: AttentionNeed, device: DeviceFacts) -> tuple[str, ...]:
        return self.capabilities.objections(need, device)

    def builder(self, spec: KVSpec, device: torch.device = CPU) -> SdpaBuilder:
        return SdpaBuilder(spec, device)

    def impl(self, need: AttentionNeed, ops: Ops) -> SdpaImpl:
        return SdpaImpl(need, ops)
