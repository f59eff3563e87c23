"""Embedding and heads, whole and divided by vocabulary."""

import pytest
import torch
import torch.nn.functional as F

from octavo.distributed.group import SingleGroup
from octavo.layers.embedding import Embedding, LMHead, TiedHead
from octavo.ops import reference
from octavo.quant.api import Unquantized

SCHEME = Unquantized(torch.float32, reference.linear)


class Together(SingleGroup):
    """A rank whose gathers are done by the test."""

    def all_gather(self, x, dim):
        return x


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("vocab", [7, 12])
def test_embeddings_of_all_ranks_sum_to_the_lookup(size, vocab):
    weight, ids = torch.randn(vocab, 4), torch.arange(vocab).flip(0)
    total = torch.zeros(vocab, 4)
    for rank in range(size):
        layer = Embedding(vocab, 4, dtype=torch.float32, gather=reference.gather_rows, group=SingleGroup(rank, size))
        layer.place("weight", None, weight)
        total += layer(ids)
    assert torch.equal(total, weight[ids])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("vocab", [7, 12])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_all_ranks_make_the_vocabulary(size, vocab, tied):
    weight, hidden = torch.randn(vocab, 4), torch.randn(2, 4)
    parts = []
    for rank in range(size):
        group = Together(rank, size)
        if tied:
            embedding = Embedding(vocab, 4, dtype=torch.float32, gather=reference.gather_rows, group=group)
            embedding.place("weight", None, weight)
            head = TiedHead(embedding, linear=reference.linear, group=group)
            head.finish()
            assert not list(head.parameters()), "a tied head has no weight of its own"
        else:
            head = LMHead(vocab, 4, bias=False, scheme=SCHEME, group=group)
            head.place("weight", None, weight)
            head.stored.finish()
        parts.append(head(hidden))
    torch.testing.assert_close(torch.cat(parts, dim=-1)[:, :vocab], F.linear(hidden, weight))


def test_wrong_shapes_are_refused():
    layer = Embedding(7, 4, dtype=torch.float32, gather=reference.gather_rows, group=SingleGroup())
    with pytest.raises(ValueError, match=r"its shape is \[8, 4\], the model's is \[7, 4\]"):
        layer.place("weight", None, torch.zeros(8, 4))
    with pytest.raises(KeyError):
        layer.place("bias", None, torch.zeros(8, 4))
    with pytest.raises(RuntimeError, match="before finish"):
        TiedHead(layer, linear=reference.linear, group=SingleGroup())(torch.zeros(1, 4))


class RowsMultiply:
    packed = True

    def __init__(self, weight):
        self.weight = weight.clone()

    def __call__(self, x):
        return x @ self.weight.T

    def rows(self, index):
        return reference.gather_rows(self.weight, index)

    def state(self):
        return {"packed": self.weight}


class RowsLinear:
    """A product whose packed form can be read by rows."""

    def __call__(self, weight, bias, out_dtype=None):
        return RowsMultiply(weight)

    def gives_rows(self, dtype):
        return dtype == torch.float32

    def packed_bytes(self, in_features, out_features, dtype):
        return in_features * out_features * dtype.itemsize

    def restore(self, state, in_features, out_features, dtype, out_dtype=None):
        return RowsMultiply(state["packed"])


def tied(vocab=7, dtype=torch.float32, size=1, rank=0):
    group = Together(rank, size)
    embedding = Embedding(vocab, 4, dtype=dtype, gather=reference.gather_rows, group=group)
    return embedding, TiedHead(embedding, linear=RowsLinear(), group=group)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_tied_table_is_held_once_where_the_head_gives_its_rows(size):
    weight, ids, hidden = torch.randn(7, 4), torch.arange(7).flip(0), torch.randn(2, 4)
    rows, logits = torch.zeros(7, 4), []
    for rank in range(size):
        embedding, head = tied(size=size, rank=rank)
        embedding.place("weight", None, weight)
        embedding.finish()
        head.finish()
        assert embedding.weight.is_meta and embedding.num_bytes == 0
        assert not embedding.state() and list(head.state()) == ["packed"]
        rows += embedding(ids)
        logits.append(head(hidden))
    assert torch.equal(rows, weight[ids])
    torch.testing.assert_close(torch.cat(logits, dim=-1)[:, :7], F.linear(hidden, weight))


def test_a_tied_table_is_restored_from_the_head_alone():
    first, head = tied()
    weight = torch.randn(7, 4)
    first.place("weight", None, weight)
    head.finish()
    embedding, again = tied()
    embedding.restore(first.state())
    again.restore(head.state())
    assert embedding.weight.is_meta and torch.equal(embedding(torch.arange(7)), weight)
    with pytest.raises(KeyError):
        embedding.restore({"weight": weight})


def test_a_table_of_its_own_is_saved_and_restored():
    layers = [Embedding(7, 4, dtype=torch.float32, gather=reference.gather_rows, group=SingleGroup()) for _ in range(2)]
    layers[0].place("weight", None, torch.randn(7, 4))
    layers[1].restore(layers[0].state())
    assert torch.equal(layers[1](torch.arange(7)), layers[0].weight) and layers[0].num_bytes == 7 * 4 * 4
    for wrong, why in (({}, KeyError), ({"weight": torch.zeros(8, 4)}, ValueError),
                       ({"weight": torch.zeros(7, 4, dtype=torch.bfloat16)}, ValueError)):  # fmt: skip
        with pytest.raises(why):
            layers[1].restore(wrong)


def test_a_head_that_gives_no_rows_of_this_type_leaves_the_table_where_it_is():
    embedding, head = tied(dtype=torch.bfloat16)
    embedding.place("weight", None, torch.randn(7, 4))
    head.finish()
    assert not embedding.weight.is_meta and embedding.num_bytes == 7 * 4 * 2 and list(embedding.state()) == ["weight"]
