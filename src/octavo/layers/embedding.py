"""Token embedding and output head, divided by vocabulary over a group of ranks.

Promises: a tied head multiplies by the embedding's own weight, with no second copy of it in the model.
Does not know: checkpoint names, or sampling.
"""

from collections.abc import Mapping

import torch
from torch import nn

from octavo.distributed.group import Group
from octavo.ops.registry import GatherRows, Linear, Multiply
from octavo.quant.api import LinearScheme, Piece, Share, as_piece, check_kind, check_shape, read_rows


class Embedding(nn.Module):
    """Token ids to vectors: [T] int64 -> [T, hidden].

    Each rank keeps `ceil(vocab / ranks)` rows; the last rank's missing ones stay unused.

    Owns: `weight` [rows, hidden].
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, gather: GatherRows, group: Group
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self._gather = gather
        self._group = group
        self._rows = -(-vocab_size // group.size)
        self._first = group.rank * self._rows
        self.weight = nn.Parameter(torch.empty(self._rows, hidden_size, dtype=dtype), requires_grad=False)

    def pieces(self) -> Mapping[str, tuple[str | None, ...]]:
        return {"weight": (None,)}

    def expects(self, parameter: str, shard: str | None) -> tuple[int, ...]:
        return (self.vocab_size, self.weight.shape[1])

    def check(self, parameter: str, shard: str | None, piece: Piece) -> None:
        if parameter != "weight" or shard is not None:
            raise KeyError(parameter)
        check_kind(piece)
        check_shape(piece, self.expects(parameter, shard))

    def place(self, parameter: str, shard: str | None, piece: torch.Tensor | Piece) -> None:
        piece = as_piece(piece)
        self.check(parameter, shard, piece)
        mine = max(0, min(self._rows, self.vocab_size - self._first))
        read_rows(self.weight.data[:mine], piece, self._first, mine)
        self.weight.data[mine:].zero_()

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._group.size == 1:
            return self._gather(self.weight, token_ids)
        return self._group.all_reduce(self._gather(self.weight, token_ids - self._first))  # zeros for others' tokens


class Head(nn.Module):
    """Hidden states to logits over the whole vocabulary: [N, hidden] -> [N, vocab].

    Owns: its stored weight.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, bias: bool, scheme: LinearScheme, group: Group) -> None:
        super().__init__()
        self._vocab_size, self._group = vocab_size, group
        rows = -(-vocab_size // group.size)
        first = group.rank * rows
        mine = max(0, min(rows, vocab_size - first))
        self._share = Share(0, mine, first, 0, hidden_size, vocab_size, hidden_size)
        self.stored = scheme.create(hidden_size, rows, bias=bias, out_dtype=torch.float32)

    def pieces(self) -> Mapping[str, tuple[str | None, ...]]:
        return dict.fromkeys(self.stored.parameter_names(), (None,))

    def expects(self, parameter: str, shard: str | None) -> tuple[int, ...]:
        return self._share.whole(parameter)

    def check(self, parameter: str, shard: str | None, piece: Piece) -> None:
        if shard is not None:
            raise KeyError(shard)
        self.stored.check(parameter, piece, self._share)

    def place(self, parameter: str, shard: str | None, piece: torch.Tensor | Piece) -> None:
        self.check(parameter, shard, as_piece(piece))
        self.stored.place(parameter, as_piece(piece), self._share)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _gather(self.stored(hidden), self._vocab_size, self._group)


class TiedHead(nn.Module):
    """A head that multiplies by the embedding's weight; its logits are float32.

    Owns: the multiplication made from it in `finish`; the embedding owns the weight.
    """

    def __init__(self, embedding: Embedding, *, linear: Linear, group: Group) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple, so that it is not counted as a child
        self._linear, self._group = linear, group
        self._multiply: Multiply | None = None

    def finish(self) -> None:
        self._multiply = self._linear(self._embedding[0].weight.data, None, torch.float32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._multiply is None:
            raise RuntimeError("the head was used before finish(); call models.build.finish(model) after loading")
        return _gather(self._multiply(hidden), self._embedding[0].vocab_size, self._group)


def _gather(logits: torch.Tensor, vocab_size: int, group: Group) -> torch.Tensor:
    return logits if group.size == 1 else group.all_gather(logits, -1)[..., :vocab_size]
