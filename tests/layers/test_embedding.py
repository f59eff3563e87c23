"""Embedding and heads, whole and divided by vocabulary."""

import pytest
import torch
import torch.nn.functional as F

from octavo.distributed.group import SingleGroup
from octavo.layers.embedding import Embedding, Head, TiedHead
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
            head = Head(vocab, 4, bias=False, scheme=SCHEME, group=group)
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
