"""Pages of one split put together from pages of another, against splitting the whole anew (PDX-7)."""

import itertools

import numpy as np
import pytest

from octavo.base.kvspec import FullAttentionSpec
from octavo.features.transfer.shards import Segment, Shard, segments


def spec(heads, dtype="bfloat16", block_size=3, head_dim=5):
    return FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_dim=head_dim, dtype=dtype)


def page(whole, heads):
    """A rank's page: its heads of every part of the model's."""
    return np.concatenate([part[list(heads)].reshape(-1) for part in whole])


def parts(num_heads, of):
    """The model's whole KV of one block of one layer, as bytes by part and head."""
    one = of.content_bytes // of.num_kv_heads
    scales = 3 * 4 if of.is_scaled else 0
    sizes = [(one - 2 * scales) // 2] * 2 + [scales] * 2 * bool(scales)
    make = np.random.default_rng(num_heads)
    return [make.integers(0, 256, (num_heads, size), dtype=np.uint8) for size in sizes]


SIZES = (1, 2, 4, 8)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 6, 8, 32])
def test_any_split_is_put_together_from_any_other(dtype, num_heads):
    tried = 0
    for mine, theirs in itertools.product(SIZES, SIZES):
        if any(num_heads % size and size % num_heads for size in (mine, theirs)):
            continue
        tried += 1
        for rank in range(mine):
            heads = Shard(rank, mine).heads(num_heads)
            of = spec(len(heads), dtype)
            whole = parts(num_heads, of)
            pages = [page(whole, Shard(r, theirs).heads(num_heads)) for r in range(theirs)]
            got = np.zeros(of.content_bytes, dtype=np.uint8)
            filled = np.zeros(of.content_bytes, dtype=int)
            for s in segments(of, num_heads, Shard(rank, mine), theirs):
                got[s.mine : s.mine + s.length] = pages[s.rank][s.theirs : s.theirs + s.length]
                filled[s.mine : s.mine + s.length] += 1
            assert (got == page(whole, heads)).all() and (filled == 1).all()
    assert tried


def test_equal_splits_are_one_segment():
    assert segments(spec(4), 8, Shard(1, 2), 2) == (Segment(1, 0, 0, spec(4).content_bytes),)


def test_ranks_that_share_a_head_ask_different_holders():
    asked = {segments(spec(1), 1, Shard(rank, 4), 4)[0].rank for rank in range(4)}
    assert asked == {0, 1, 2, 3}


def test_what_is_replicated_comes_whole():
    assert segments(spec(1), 1, Shard(3, 4), 2, replicated=True) == (Segment(1, 0, 0, spec(1).content_bytes),)


def test_what_cannot_be_split_is_said():
    with pytest.raises(ValueError, match="6 KV heads cannot be split over 4 ranks"):
        segments(spec(2), 6, Shard(0, 3), 4)
    with pytest.raises(ValueError, match="holds 3 KV heads, its pages 2"):
        segments(spec(2), 6, Shard(0, 2), 1)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        Shard(2, 2)
