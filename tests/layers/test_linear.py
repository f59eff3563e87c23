"""Shares of ranks, put together again, are the whole layer."""

import pytest
import torch
import torch.nn.functional as F

from octavo.distributed.group import SingleGroup
from octavo.layers.linear import ColumnLinear, RowLinear
from octavo.ops import reference
from octavo.quant.api import Unquantized

SCHEME = Unquantized(torch.float32, reference.linear)


def ranks(size):
    """Groups as each rank sees them; sums are done by the test."""
    return [SingleGroup(rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_columns_of_all_ranks_make_the_output(size, bias):
    x, weights = torch.randn(3, 6), {"gate": torch.randn(8, 6), "up": torch.randn(8, 6)}
    biases = {name: torch.randn(8) for name in weights}
    parts = []
    for group in ranks(size):
        layer = ColumnLinear(6, {"gate": 8, "up": 8}, bias=bias, scheme=SCHEME, group=group)
        assert layer.pieces() == dict.fromkeys(("weight", "bias") if bias else ("weight",), ("gate", "up"))
        for name, weight in weights.items():
            layer.place("weight", name, weight)
            if bias:
                layer.place("bias", name, biases[name])
        layer.stored.finish()
        assert layer.sizes() == (8 // size, 8 // size)
        parts.append(layer(x).split(layer.sizes(), dim=-1))
    for i, name in enumerate(weights):
        got = torch.cat([part[i] for part in parts], dim=-1)
        torch.testing.assert_close(got, F.linear(x, weights[name], biases[name] if bias else None))


@pytest.mark.parametrize(("size", "kv_heads"), [(1, 2), (2, 2), (4, 2), (4, 1), (2, 6)])
def test_ranks_share_key_heads_when_there_are_too_few(size, kv_heads):
    dim, heads = 3, 12
    x, key = torch.randn(2, 5), torch.randn(kv_heads * dim, 5)
    whole = F.linear(x, key).view(2, kv_heads, dim)
    for group in ranks(size):
        layer = ColumnLinear(
            5,
            {"q": heads * dim, "k": kv_heads * dim},
            heads={"q": heads, "k": kv_heads},
            bias=False,
            scheme=SCHEME,
            group=group,
        )
        layer.place("weight", "q", torch.zeros(heads * dim, 5))
        layer.place("weight", "k", key)
        layer.stored.finish()
        mine = layer(x)[:, heads * dim // size :].view(2, -1, dim)
        first_query = group.rank * heads // size  # the key head of this rank's first query head
        first = first_query * kv_heads // heads
        torch.testing.assert_close(mine, whole[:, first : first + max(1, kv_heads // size)])


def test_heads_that_do_not_divide_are_named():
    def build(kv_heads):
        shards = {"q": 12, "k": kv_heads * 3}
        return ColumnLinear(
            5, shards, heads={"q": 4, "k": kv_heads}, bias=False, scheme=SCHEME, group=SingleGroup(0, 4)
        )

    with pytest.raises(ValueError, match="the k size: 3 heads cannot be shared by 4 ranks"):
        build(3)
    with pytest.raises(ValueError, match=r"the k size \(6\) cannot be split over 4 ranks"):
        build(6)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_rows_of_all_ranks_sum_to_the_output(size, bias):
    x, weight, offset = torch.randn(3, 6), torch.randn(5, 6), torch.randn(5)
    total = torch.zeros(3, 5)
    for group, part in zip(ranks(size), x.chunk(size, dim=-1), strict=True):
        layer = RowLinear(6, 5, bias=bias, scheme=SCHEME, group=group)
        layer.place("weight", None, weight)
        if bias:
            layer.place("bias", None, offset)  # every rank is given it, one keeps it
        layer.stored.finish()
        total += layer(part)
    torch.testing.assert_close(total, F.linear(x, weight, offset if bias else None))


def test_wrong_shapes_and_shards_are_refused():
    layer = ColumnLinear(6, {"gate": 8, "up": 8}, bias=False, scheme=SCHEME, group=SingleGroup())
    with pytest.raises(ValueError, match=r"its shape is \[8, 5\], the model's is \[8, 6\]"):
        layer.place("weight", "gate", torch.zeros(8, 5))
    with pytest.raises(KeyError):
        layer.place("weight", "down", torch.zeros(8, 6))
    with pytest.raises(KeyError):
        RowLinear(6, 5, bias=False, scheme=SCHEME, group=SingleGroup()).place("weight", "q", torch.zeros(5, 6))
