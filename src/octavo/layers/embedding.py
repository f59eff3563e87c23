"""Token embedding and output head, divided by vocabulary over a group of ranks.

Promises: a tied head multiplies by the embedding's own weight, which is kept once where the packed form of it can be
read by rows, and a second time packed where it cannot.
Does not know: checkpoint names, or sampling.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from octavo.distributed.group import Group
from octavo.ops.registry import GatherRows, Linear, Multiply
from octavo.quant.api import (
    GivesRows,
    LinearScheme,
    PackingLinear,
    Piece,
    RowsLinear,
    Share,
    Unquantized,
    as_piece,
    check_kind,
    check_shape,
    read_rows,
    state_of,
)


class Embedding(nn.Module):
    """Token ids to vectors: [T] int64 -> [T, hidden].

    Each rank keeps `ceil(vocab / ranks)` rows; the last rank's missing ones stay unused.

    Owns: `weight` [rows, hidden]; without content when a tied head has it.
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
        # in tuples, so that they are not counted as children
        self._sharing: tuple[StoredTiedHead, ...] = ()
        self._taker: tuple[TiedHead, ...] = ()
        self._rows_by: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def share(self) -> Share:
        """This rank's part of the table."""
        mine = max(0, min(self._rows, self.vocab_size - self._first))
        hidden_size = self.weight.shape[1]
        return Share(0, mine, self._first, 0, hidden_size, self.vocab_size, hidden_size)

    def share_pieces(self, head: "StoredTiedHead") -> None:
        """Show `head` each tensor that comes."""
        self._sharing += (head,)

    def give_to(self, head: "TiedHead") -> None:
        """`head` will keep the weight; `hand_over` says that it does."""
        self._taker = (head,)

    def hand_over(self, rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """From now on rows come from there, and the table's memory goes."""
        self._rows_by = rows
        self.weight = nn.Parameter(torch.empty_like(self.weight, device="meta"), requires_grad=False)

    def finish(self) -> None:
        """Let the head take the weight now, not when all other layers are in memory beside it."""
        for head in self._taker:
            head.finish()

    @property
    def num_bytes(self) -> int:
        return 0 if self._taker else self.weight.numel() * self.weight.element_size()

    def state(self) -> Mapping[str, torch.Tensor]:
        return {} if self._taker else {"weight": self.weight.data}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        if state.keys() != self.state().keys():
            raise KeyError(f"{sorted(state)} is not {sorted(self.state())}")
        if not self._taker:
            check_shape(as_piece(state["weight"]), tuple(self.weight.shape))
            if state["weight"].dtype != self.weight.dtype:
                raise ValueError(f"the embedding is {state['weight'].dtype}")
            self.weight = nn.Parameter(state["weight"], requires_grad=False)

    def pieces(self) -> Mapping[str, tuple[str | None, ...]]:
        return {"weight": (None,)}

    def expects(self, parameter: str, shard: str | None) -> tuple[int, ...]:
        return (self.vocab_size, self.weight.shape[1])

    def check(self, parameter: str, shard: str | None, piece: Piece) -> None:
        if parameter != "weight" or shard is not None:
            raise KeyError(parameter)
        check_kind(piece)
        check_shape(piece, self.expects(parameter, shard))
        for head in self._sharing:
            head.check(piece)

    def place(self, parameter: str, shard: str | None, piece: torch.Tensor | Piece) -> None:
        piece = as_piece(piece)
        self.check(parameter, shard, piece)
        mine = self.share.rows
        read_rows(self.weight.data[:mine], piece, self._first, mine)
        self.weight.data[mine:].zero_()
        for head in self._sharing:
            head.place(piece)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._group.size == 1:
            return self._rows_of(token_ids)
        return self._group.all_reduce(self._rows_of(token_ids - self._first))  # zeros for others' tokens

    def _rows_of(self, index: torch.Tensor) -> torch.Tensor:
        return self._gather(self.weight, index) if self._rows_by is None else self._rows_by(index)


class LMHead(nn.Module):
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

    Owns: the multiplication made from it in `finish`; the embedding owns the weight, unless the multiplication gives
    its rows.
    """

    def __init__(self, embedding: Embedding, *, linear: Linear, group: Group) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple, so that it is not counted as a child
        self._linear, self._group = linear, group
        self._multiply: Multiply | None = None
        self._takes = isinstance(linear, RowsLinear) and linear.gives_rows(embedding.weight.dtype)
        if self._takes:
            embedding.give_to(self)

    def finish(self) -> None:
        if self._multiply is None:
            self._use(self._linear(self._embedding[0].weight.data, None, torch.float32))

    def _use(self, multiply: Multiply) -> None:
        self._multiply = multiply
        if self._takes:
            if not isinstance(multiply, GivesRows):
                raise RuntimeError(f"{type(multiply).__name__} gives no rows, although it was promised")
            self._embedding[0].hand_over(multiply.rows)

    @property
    def num_bytes(self) -> int:
        weight = self._embedding[0].weight
        if not isinstance(self._linear, PackingLinear):
            return 0
        return self._linear.packed_bytes(weight.shape[1], weight.shape[0], weight.dtype)

    def state(self) -> Mapping[str, torch.Tensor]:
        if self._multiply is None:
            raise RuntimeError("state() was called before finish()")
        return state_of(self._multiply) if self._multiply.packed else {}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        weight = self._embedding[0].weight
        if state and isinstance(self._linear, PackingLinear):
            shape = (weight.shape[1], weight.shape[0])
            self._use(self._linear.restore(state, *shape, weight.dtype, torch.float32))
        else:
            self.finish()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._multiply is None:
            raise RuntimeError("the head was used before finish(); call models.filling.finish(model) after loading")
        return _gather(self._multiply(hidden), self._embedding[0].vocab_size, self._group)


class StoredTiedHead(nn.Module):
    """A head that keeps the embedding's weight in a form of its own, made from the same tensor of the checkpoint.

    Owns: its stored weight.
    """

    def __init__(self, embedding: Embedding, *, scheme: LinearScheme, group: Group) -> None:
        super().__init__()
        self._vocab_size, self._group = embedding.vocab_size, group
        rows, hidden_size = embedding.weight.shape
        self._share = embedding.share
        self.stored = scheme.create(hidden_size, rows, bias=False, out_dtype=torch.float32)
        embedding.share_pieces(self)

    def check(self, piece: Piece) -> None:
        """Look at the tensor that will be placed."""
        self.stored.check("weight", piece, self._share)

    def place(self, piece: Piece) -> None:
        """Take the embedding's tensor."""
        self.stored.place("weight", piece, self._share)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _gather(self.stored(hidden), self._vocab_size, self._group)


def tied_head(embedding: Embedding, *, scheme: LinearScheme, linear: Linear, group: Group) -> TiedHead | StoredTiedHead:
    """The head of a model whose head and embedding share a weight: kept once, unless the scheme rounds weights."""
    if isinstance(scheme, Unquantized):
        return TiedHead(embedding, linear=linear, group=group)
    return StoredTiedHead(embedding, scheme=scheme, group=group)


def _gather(logits: torch.Tensor, vocab_size: int, group: Group) -> torch.Tensor:
    return logits if group.size == 1 else group.all_gather(logits, -1)[..., :vocab_size]
