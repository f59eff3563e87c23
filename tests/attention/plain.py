"""Attention in plain loops, and a paged cache to run a backend over: what conformance tests compare.

The cache is made as the engine makes it: blocks of one row lie anywhere, K and V pages of several layers share a
buffer, so views are not contiguous; everything that no token was written to is NaN.
"""

from dataclasses import dataclass

import numpy as np
import torch

from octavo.attention.api import AttentionNeed, Backend, alibi_slopes
from octavo.attention.batch import AttentionBatch
from octavo.base.kvspec import FullAttentionSpec, KVSpec, SlidingWindowSpec
from octavo.config.facts import DeviceFacts
from octavo.forward.context import LayerBinding
from octavo.ops.registry import OpRegistry, dtype_name

CPU_FACTS = DeviceFacts(kind="cpu", name="test", memory_total_bytes=1, memory_available_bytes=1, num_cores=1)

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest absolute difference from the plain loops in float64, for standard normal inputs; four times as much with a
softcap, which multiplies the rounding of tanh."""


CODES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Types with a scale for each token and head, and the highest value of each."""


def scaled(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What a cache of `dtype` holds of keys or values [..., D]: codes, and scales [...] (ATT-10)."""
    x = x.float()
    high = x.abs().amax(-1, keepdim=True)
    most = torch.full_like(high, CODES[dtype])
    y = (x * torch.where(high > 0, most / high, 0.0)).clamp(-most, most)
    codes = y.round() if dtype is torch.int8 else torch.where(y.abs() < torch.finfo(dtype).tiny, y * 0, y)
    return codes.to(dtype), (high / most).squeeze(-1)


def need_of(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.float32, window: int | None = None
) -> AttentionNeed:
    return AttentionNeed(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        dtype=dtype,
        kv_dtype=dtype,
        window=window,
    )


def spec_of(need: AttentionNeed, block_size: int, window: int | None) -> KVSpec:
    common = {
        "block_size": block_size,
        "num_kv_heads": need.num_kv_heads,
        "head_dim": need.head_dim,
        "dtype": dtype_name(need.kv_dtype),
    }
    return FullAttentionSpec(**common) if window is None else SlidingWindowSpec(**common, window=window)


def attend_plainly(query, key, value, context, scale, window=None, softcap=None, slopes=None, sinks=None):
    """One row: query [n, H, D], key and value [context + n, G, D] -> [n, H, D], in float64.

    `slopes` and `sinks` are [H]; a query sees `window` positions, its own included.
    """
    query, key, value = query.double(), key.double(), value.double()
    shared = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    scores = torch.einsum("nhd,shd->hns", query, key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    behind = (context + torch.arange(len(query)))[:, None] - torch.arange(len(key))  # how far a key lies before a query
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * behind
    hidden = (behind < 0) | (behind >= (window or len(key)))
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(query), 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(key)]
    return torch.einsum("hns,shd->nhd", weights, value)


@dataclass
class Paged:
    """A paged cache with a block table for each row."""

    binding: LayerBinding
    block_table: np.ndarray
    block_size: int


def paged_cache(
    need: AttentionNeed, seq_lens, block_size: int, gen: np.random.Generator, spare_blocks: int = 3
) -> Paged:
    widths = [-(-n // block_size) for n in seq_lens]
    num_blocks = 1 + sum(widths) + spare_blocks
    shape = (num_blocks, 2, 2, need.num_kv_heads, block_size, need.head_dim)  # two layers' pages in each block
    buffer = torch.full(shape, float("nan")).to(need.kv_dtype)
    ids = gen.permutation(np.arange(1, num_blocks))
    table = np.zeros((len(seq_lens), max(widths) + 2), dtype=np.int32)
    at = 0
    for row, width in enumerate(widths):
        table[row, :width] = ids[at : at + width]
        at += width
    scales: tuple[torch.Tensor, ...] | tuple[None, None] = (None, None)
    if need.kv_dtype in CODES:
        scales = torch.full((num_blocks, 2, 2, need.num_kv_heads, block_size), float("nan"))[:, 1].unbind(1)
    binding = LayerBinding(
        key=buffer[:, 1, 0], value=buffer[:, 1, 1], group=0, key_scale=scales[0], value_scale=scales[1]
    )
    return Paged(binding, table, block_size)


def stored(binding: LayerBinding, block: int, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The key and the value [G, D] that the cache holds of one token."""
    pair = []
    for cache, scale in ((binding.key, binding.key_scale), (binding.value, binding.value_scale)):
        plain = cache[block, :, offset].float()
        pair.append(plain if scale is None else plain * scale[block, :, offset, None])
    return pair[0], pair[1]


def run_and_compare(
    backend: Backend,
    need: AttentionNeed,
    rows,  # (context, query) lengths
    block_size: int,
    *,
    group_window: int | None = None,
    padding: int = 0,
    seed: int = 0,
) -> None:
    """Fill the context, run one step through the backend, compare every token with the plain loops."""
    gen = np.random.default_rng(seed)
    torch.manual_seed(seed)
    group_window = need.window if group_window is None else group_window
    contexts, counts = [c for c, _ in rows], [q for _, q in rows]
    seqs = [c + q for c, q in rows]
    cache = paged_cache(need, seqs, block_size, gen)
    impl = backend.impl(need, OpRegistry().bind(CPU_FACTS, need.dtype))
    keys = [torch.randn(n, need.num_kv_heads, need.head_dim).to(need.dtype) for n in seqs]
    values = [torch.randn(n, need.num_kv_heads, need.head_dim).to(need.dtype) for n in seqs]

    def batch_of(starts, lens, padded=None):
        return AttentionBatch.of(
            query_lens=lens,
            context_lens=starts,
            block_table=cache.block_table,
            block_size=block_size,
            padded_tokens=padded,
        )

    if sum(contexts):  # what earlier steps wrote
        filled = [r for r, c in enumerate(contexts) if c]
        before = AttentionBatch.of(
            query_lens=[contexts[r] for r in filled],
            context_lens=[0] * len(filled),
            block_table=cache.block_table[filled],
            block_size=block_size,
        )
        old_k = torch.cat([k[:c] for k, c in zip(keys, contexts, strict=True)])
        old_v = torch.cat([v[:c] for v, c in zip(values, contexts, strict=True)])
        impl.write(old_k, old_v, cache.binding, before.slot_mapping_tensor())
    if need.window is not None and group_window is not None:  # blocks that the group's window left were taken away
        for row, context in enumerate(contexts):
            gone = max(0, context - group_window + 1) // block_size
            for block in cache.block_table[row, :gone] if need.kv_dtype.is_floating_point else ():
                cache.binding.key[int(block)] = cache.binding.value[int(block)] = float("nan")
            cache.block_table[row, :gone] = 0

    total = sum(counts)
    batch = batch_of(contexts, counts, total + padding)
    query = torch.randn(total + padding, need.num_heads, need.head_dim).to(need.dtype)
    pad = torch.zeros(padding, need.num_kv_heads, need.head_dim, dtype=need.dtype)
    new_k = torch.cat([*(k[c:] for k, c in zip(keys, contexts, strict=True)), pad])
    new_v = torch.cat([*(v[c:] for v, c in zip(values, contexts, strict=True)), pad])
    plan = backend.builder(spec_of(need, block_size, group_window)).plan(batch)
    impl.write(new_k, new_v, cache.binding, batch.slot_mapping_tensor())
    sinks = torch.randn(need.num_heads) if need.sinks else None
    slopes = torch.tensor(need.slopes or alibi_slopes(need.num_heads)) if need.alibi else None
    out = impl.run(query, new_k, new_v, cache.binding, plan, sinks)

    if need.kv_dtype != need.dtype:  # what is attended to is what was stored: what was given, as this type can hold it
        for row, n in enumerate(seqs):
            oldest = 0 if group_window is None else max(0, contexts[row] - group_window + 1)
            places = [divmod(p, block_size) for p in range(oldest, n)]
            kept = [stored(cache.binding, int(cache.block_table[row, block]), offset) for block, offset in places]
            for given, at in ((keys, 0), (values, 1)):
                if need.kv_dtype in CODES:
                    codes, scales = scaled(given[row], need.kv_dtype)
                    given[row] = codes.float() * scales.unsqueeze(-1)
                else:
                    given[row] = given[row].to(need.kv_dtype).float()
                assert torch.equal(torch.stack([pair[at] for pair in kept]), given[row][oldest:])

    assert out.shape == query.shape and out.dtype == need.dtype
    assert torch.isfinite(out).all(), "stale memory leaked into a result"
    at = 0
    for row, (context, count) in enumerate(rows):
        mine = query[at : at + count]
        want = attend_plainly(
            mine, keys[row], values[row], context, need.scale, need.window, need.softcap, slopes, sinks
        )
        gap = (out[at : at + count].double() - want).abs().max().item()
        limit = TOLERANCE[need.dtype] * (1 if need.softcap is None else 4)
        assert gap <= limit, f"row {row} ({context}+{count}) differs by {gap}"
        at += count
