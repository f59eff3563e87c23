"""The reference backend against plain loops (ATT-12): head sizes, group ratios, windows, blocks, ragged rows, types."""

import numpy as np
import pytest
import torch

from octavo.attention import sdpa
from octavo.attention.batch import AttentionBatch
from octavo.attention.sdpa import SdpaBackend, gather
from octavo.base.kvspec import FullAttentionSpec
from tests.attention.plain import need_of, run_and_compare

BACKEND = SdpaBackend()
RAGGED = [(0, 5), (3, 1), (15, 1), (16, 1), (17, 1), (31, 2), (0, 1), (14, 17), (40, 33), (7, 16)]


@pytest.mark.parametrize("block_size", [1, 16, 48, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 8), (4, 4, 16), (9, 3, 64), (6, 1, 24), (4, 2, 40)])
def test_ragged_rows_for_head_shapes_and_block_sizes(heads, kv_heads, dim, block_size):
    run_and_compare(BACKEND, need_of(heads, kv_heads, dim), RAGGED, block_size)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33, 1000])
@pytest.mark.parametrize("block_size", [16, 32])
def test_windows_see_the_last_tokens_and_nothing_that_was_freed(window, block_size):
    run_and_compare(BACKEND, need_of(4, 2, 16, window=window), RAGGED, block_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("window", [None, 9])
def test_types(dtype, window):
    run_and_compare(BACKEND, need_of(6, 2, 32, dtype, window), RAGGED, 16, padding=3)


@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("window", [None, 16])
def test_block_edges_for_one_token_and_for_chunks(edge, blocks, window):
    length = 16 * blocks + edge
    rows = [(length - 1, 1), (0, length), (length, 1), (length, 3), (length // 2, length - length // 2)]
    run_and_compare(BACKEND, need_of(2, 1, 16, window=window), rows, 16)


@pytest.mark.parametrize("rows", [[(0, 1)], [(63, 1)], [(0, 64)], [(64, 1)] * 9, [(0, 7)] * 5])
def test_uniform_batches(rows):
    run_and_compare(BACKEND, need_of(3, 3, 20), rows, 16)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("rows", [[(0, 1)], [(3, 1), (40, 1), (17, 1)], [(200, 1), (1, 1), (150, 1)]])
def test_decode_rows_of_like_and_unlike_lengths(rows, window, padding):
    run_and_compare(BACKEND, need_of(4, 2, 16, window=window), rows, 16, padding=padding)


def test_padding_tokens_are_finite_and_touch_no_row():
    run_and_compare(BACKEND, need_of(4, 2, 16), [(5, 1), (0, 9)], 16, padding=7)


@pytest.mark.parametrize("window", [None, 40, 300])
def test_long_rows_go_in_tiles(monkeypatch, window):
    monkeypatch.setattr(sdpa, "TILE", 24)
    run_and_compare(BACKEND, need_of(2, 1, 8, window=window), [(0, 100), (33, 70), (130, 25)], 16)


def test_a_tile_is_as_wide_as_promised():
    run_and_compare(BACKEND, need_of(2, 1, 8, window=100), [(10, 270)], 64)


@pytest.mark.parametrize(("own", "group"), [(7, 40), (40, 7), (16, 17)])
def test_the_layers_own_window_wins_over_the_groups(own, group):
    """ATT-7: one group may hold layers of both kinds; here nothing was freed that the layer still needs."""
    rows = [(0, 20), (0, 1), (group - 2, 1)] if own > group else RAGGED
    run_and_compare(BACKEND, need_of(4, 2, 16, window=own), rows, 16, group_window=group)


def test_full_and_windowed_layers_share_one_plan():
    """ATT-7: the plan of a full group serves a windowed layer."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")
    batch = AttentionBatch.of(
        query_lens=[1, 4], context_lens=[30, 0], block_table=np.array([[1, 2], [3, 0]], np.int32), block_size=16
    )
    plan = BACKEND.builder(spec).plan(batch)
    assert plan.view(None) is plan.view(None), "a view is planned once a step"
    assert plan.view(4) is plan.view(4) and plan.view(4) is not plan.view(None)
    (full,), (near,) = plan.view(None).buckets, plan.view(4).buckets
    assert (full.length, near.length) == (32, 16), "a windowed layer gathers only the blocks it sees"


def test_decode_rows_are_bucketed_by_length_within_the_memory_limit():
    lens = [1, 100, 64, 5000, 4900, 20, 300, 40_000, 90_000]
    size = 64
    width = -(-max(lens) // size)
    batch = AttentionBatch.of(
        query_lens=[1] * len(lens),
        context_lens=[n - 1 for n in lens],
        block_table=np.ones((len(lens), width), np.int32),
        block_size=size,
    )
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_dim=8, dtype="float32")
    buckets = BACKEND.builder(spec).plan(batch).view(None).buckets
    rows = sorted(int(t) for b in buckets for t in b.tokens)
    assert rows == list(range(len(lens)))
    for bucket in buckets:
        mine = [lens[int(t)] for t in bucket.tokens]
        assert len(mine) == 1 or bucket.length * len(mine) <= sdpa.BUCKET_TOKENS
        assert bucket.length <= max(sdpa.BUCKET_WASTE * (min(mine) + size), min(mine) + size + sdpa.BUCKET_SLACK)
    assert len(buckets) < len(lens)


def test_gather_equals_plain_indexing():
    cache = torch.randn(7, 2, 3, 4, 5)[:, 1]
    blocks = torch.tensor([6, 0, 3])
    want = torch.cat([cache[b] for b in (6, 0, 3)], dim=1)
    assert torch.equal(gather(cache, blocks), want)


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(seed):
    gen = np.random.default_rng(seed)
    kv_heads = int(gen.integers(1, 4))
    need = need_of(
        kv_heads * int(gen.integers(1, 4)), kv_heads, int(gen.integers(1, 9)) * 8, window=[None, 21][seed % 2]
    )
    rows = [
        (int(gen.integers(0, 70)) * int(gen.integers(0, 2)), int(gen.choice([1, 1, 1, 2, 19, 50]))) for _ in range(12)
    ]
    run_and_compare(BACKEND, need, rows, int(gen.choice([16, 32, 64])), seed=seed, padding=seed)
