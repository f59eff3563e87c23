"""Linear layers, cut over a group of ranks.

Promises: the layer knows which rows or columns of the checkpoint are its own; the scheme knows how they are stored.
Does not know: checkpoint names, or any storage format.

Cut by column (the output is divided) and by row (the input is divided, and the results are summed): Shoeybi et al.,
Megatron-LM, 2019.
"""

from collections.abc import Mapping

import torch
from torch import nn

from octavo.distributed.group import Group, split_evenly
from octavo.quant.api import LinearScheme, Piece, Share, as_piece


class ColumnLinear(nn.Module):
    """One or more weights stacked by rows, each divided over the group: [T, in] -> [T, sum of shares].

    `shards` gives each stacked weight's whole output size by name ({"gate": I, "up": I}); a lone weight has the
    name None. `heads` says for a shard how many heads it has: with fewer heads than ranks, ranks hold copies.

    Owns: its stored weight.
    """

    def __init__(
        self,
        in_features: int,
        shards: Mapping[str | None, int],
        *,
        bias: bool,
        scheme: LinearScheme,
        group: Group,
        heads: Mapping[str | None, int] | None = None,
    ) -> None:
        super().__init__()
        self._shares: dict[str | None, Share] = {}
        row = 0
        for name, size in shards.items():
            unit = size if heads is None else size // heads[name]
            rows, start = _my_rows(size, unit if heads is not None else 1, group, f"the {name or 'output'} size")
            self._shares[name] = Share(row, rows, start, 0, in_features, size, in_features)
            row += rows
        self.out_features = row
        self.stored = scheme.create(in_features, row, bias=bias)

    def sizes(self) -> tuple[int, ...]:
        """This rank's output size of each shard, in order."""
        return tuple(share.rows for share in self._shares.values())

    def pieces(self) -> Mapping[str, tuple[str | None, ...]]:
        return dict.fromkeys(self.stored.parameter_names(), tuple(self._shares))

    def expects(self, parameter: str, shard: str | None) -> tuple[int, ...]:
        return self._shares[shard].whole(parameter)

    def check(self, parameter: str, shard: str | None, piece: Piece) -> None:
        self.stored.check(parameter, piece, self._shares[shard])

    def place(self, parameter: str, shard: str | None, piece: torch.Tensor | Piece) -> None:
        self.stored.place(parameter, as_piece(piece), self._shares[shard])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stored(x)


class RowLinear(nn.Module):
    """A weight divided by its input: [T, in / ranks] -> [T, out], summed over the group.

    Owns: its stored weight.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, scheme: LinearScheme, group: Group) -> None:
        super().__init__()
        mine = split_evenly(in_features, group, "the input size")
        self._share = Share(0, out_features, 0, group.rank * mine, mine, out_features, in_features)
        self._group = group
        # The results are summed, so only the first rank adds the bias.
        self._skips_bias = bias and group.rank > 0
        self.stored = scheme.create(mine, out_features, bias=bias and not self._skips_bias)

    def pieces(self) -> Mapping[str, tuple[str | None, ...]]:
        return dict.fromkeys(self.stored.parameter_names(), (None,))

    def expects(self, parameter: str, shard: str | None) -> tuple[int, ...]:
        return self._share.whole(parameter)

    def check(self, parameter: str, shard: str | None, piece: Piece) -> None:
        if shard is not None:
            raise KeyError(shard)
        if not (parameter == "bias" and self._skips_bias):
            self.stored.check(parameter, piece, self._share)

    def place(self, parameter: str, shard: str | None, piece: torch.Tensor | Piece) -> None:
        self.check(parameter, shard, as_piece(piece))
        if not (parameter == "bias" and self._skips_bias):
            self.stored.place(parameter, as_piece(piece), self._share)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.stored(x)
        return out if self._group.size == 1 else self._group.all_reduce(out)


def _my_rows(size: int, unit: int, group: Group, what: str) -> tuple[int, int]:
    """(how many rows, first row) of this rank, in whole units; ranks share units when there are too few."""
    units = size // unit
    if units >= group.size:
        mine = split_evenly(units, group, what)
        return mine * unit, group.rank * mine * unit
    if group.size % units:
        raise ValueError(f"{what}: {units} heads cannot be shared by {group.size} ranks")
    return unit, group.rank // (group.size // units) * unit
