"""A linear layer whose weight is kept as small integers.

Promises: a weight is read, rounded and packed a few MB at a time; what a packing has no form for is kept as floats.
Does not know: where the integers come from: a `Packing` does (`quant.int8`, `quant.int4`, `quant.gguf`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import torch
from torch import nn

from octavo.ops.quantized import KINDS, PackedMultiply, QuantizedLinear, QuantizedPart, QuantizedRows
from octavo.quant.api import LinearScheme, Piece, Share, StoredLinear, as_piece, read_rows

_CHUNK_NUMBERS: Final = 8 << 20  # of a weight that are read and packed at once
_ROWS_TOGETHER: Final = 32  # a chunk has a multiple of these, so that no panel is written twice

Pieces = Mapping[str, Piece]  # of one shard, by parameter


class Packing(Protocol):
    """How a checkpoint's tensors become small integers."""

    def parameters(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """What the checkpoint stores of a layer of these names, besides its bias."""

    def check(self, parameter: str, piece: Piece, share: Share, names: tuple[str, ...]) -> None:
        """Raises as `StoredLinear.check` does."""

    def kind(self, pieces: Pieces, share: Share, names: tuple[str, ...]) -> str | None:
        """One of `ops.quantized.KINDS`; None to keep the weight as floats."""

    def likely_kind(self, names: tuple[str, ...]) -> str | None:
        """The same before pieces have come."""

    def rows(self, kind: str, pieces: Pieces, share: Share, first: int, count: int) -> QuantizedRows:
        """Rows `first` .. `first + count` of our share."""


@runtime_checkable
class SizedPacking(Protocol):
    """A `QuantizedLinear` that knows how large its packed form is, and takes it back."""

    def packed_bytes(self, kind: str, num_rows: int, in_features: int) -> int: ...

    def restore(
        self, state: Mapping[str, torch.Tensor], in_features: int, out_features: int, out_dtype: torch.dtype
    ) -> PackedMultiply: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedShape:
    """Of one layer's weight on this rank, and what its results are."""

    in_features: int
    out_features: int
    bias: bool
    out_dtype: torch.dtype


class PackedLinear(nn.Module):
    """One weight [out, in] as a `Packing` has it; its shards may be of several kinds.

    `as_floats` makes the layer that holds it where the packing has no form for it.

    Owns: the pieces that have come, until `finish`; then the product made of them, or the layer of floats.
    """

    def __init__(
        self, shape: PackedShape, *, packing: Packing, multiply: QuantizedLinear, as_floats: Callable[[], StoredLinear]
    ) -> None:
        super().__init__()
        self._shape, self._packing = shape, packing
        self._make, self._as_floats = multiply, as_floats
        self._names: tuple[str, ...] = ()
        self._pieces: list[tuple[str, Piece, Share]] = []
        # In a tuple, so that a layer of floats is not counted as a child and finished again.
        self._made: tuple[PackedMultiply | StoredLinear, ...] = ()

    def named(self, names: tuple[str, ...]) -> None:
        """Its names in a checkpoint: one for each shard. Called once, before anything else."""
        self._names = names

    def parameter_names(self) -> tuple[str, ...]:
        return (*self._packing.parameters(self._names), *(("bias",) if self._shape.bias else ()))

    def check(self, parameter: str, piece: Piece, share: Share) -> None:
        if parameter not in self.parameter_names():
            raise KeyError(parameter)
        self._packing.check(parameter, piece, share, self._names)

    def place(self, parameter: str, piece: torch.Tensor | Piece, share: Share) -> None:
        self.check(parameter, as_piece(piece), share)
        self._pieces.append((parameter, as_piece(piece), share))

    def finish(self) -> None:
        if self._made:
            raise RuntimeError("finish() was called twice on a weight")
        kinds = [self._packing.kind(pieces, share, self._names) for pieces, share in self._shards()]
        if None in kinds:
            floats = self._floats()
            floats.finish()
            self._made = (floats,)
        else:
            parts = [self._part(kind or "", *shard) for kind, shard in zip(kinds, self._shards(), strict=True)]
            shape = self._shape
            self._made = (self._make([*parts, *self._rest(parts)], shape.in_features, self._bias(), shape.out_dtype),)
        for _, piece, _ in self._pieces:
            piece.forget()
        self._pieces.clear()

    def _shards(self) -> list[tuple[Pieces, Share]]:
        """The weight's shards in the order of our rows, each with all its parameters."""
        found: dict[int, tuple[dict[str, Piece], Share]] = {}
        for name, piece, share in self._pieces:
            if name != "bias":
                found.setdefault(share.row, ({}, share))[0][name] = piece
        return [found[row] for row in sorted(found)]

    def _part(self, kind: str, pieces: Pieces, share: Share) -> QuantizedPart:
        return QuantizedPart(kind=kind, num_rows=share.rows, chunks=self._chunks(kind, pieces, share))

    def _chunks(self, kind: str, pieces: Pieces, share: Share) -> Iterator[QuantizedRows]:
        step = max(1, _CHUNK_NUMBERS // share.columns // _ROWS_TOGETHER) * _ROWS_TOGETHER
        for first in range(0, share.rows, step):
            yield self._packing.rows(kind, pieces, share, first, min(step, share.rows - first))
            for piece in pieces.values():
                piece.forget()

    def _rest(self, parts: list[QuantizedPart]) -> list[QuantizedPart]:
        """Outputs that no shard fills: a head's last rank may have fewer words than rows."""
        missing = self._shape.out_features - sum(part.num_rows for part in parts)
        if missing == 0:
            return []
        by_row = bool(parts) and KINDS[parts[0].kind].span is None
        empty = zeros("int8" if by_row else "int8_half", missing, self._shape.in_features)
        return [QuantizedPart(kind=empty.kind, num_rows=missing, chunks=[empty])]

    def _bias(self) -> torch.Tensor | None:
        if not self._shape.bias:
            return None
        bias = torch.zeros(self._shape.out_features)
        for name, piece, share in self._pieces:
            if name == "bias":
                read_rows(bias[share.row : share.row + share.rows], piece, share.source_row, share.rows)
        return bias

    def _floats(self) -> StoredLinear:
        floats = self._as_floats()
        for parameter, piece, share in self._pieces:
            floats.place(parameter, piece, share)
        return floats

    @property
    def num_bytes(self) -> int:
        if self._made:
            return self._made[0].num_bytes
        shape, shards = self._shape, self._shards()
        kinds = [self._packing.kind(pieces, share, self._names) for pieces, share in shards]
        if not shards:
            kinds = [self._packing.likely_kind(self._names)]
        if None in kinds:
            return self._floats().num_bytes
        rows = [share.rows for _, share in shards] or [shape.out_features]
        weight = sum(self._packed_bytes(kind or "", count) for kind, count in zip(kinds, rows, strict=True))
        return weight + (shape.out_features * 4 if shape.bias else 0)

    def _packed_bytes(self, kind: str, rows: int) -> int:
        inputs, what = self._shape.in_features, KINDS[kind]
        if isinstance(self._make, SizedPacking):
            scales = -(-rows // _ROWS_TOGETHER) * _ROWS_TOGETHER * 4 if what.span is None else 0
            return self._make.packed_bytes(kind, rows, inputs) + scales
        return rows * inputs  # the reference keeps a byte for each number

    def state(self) -> Mapping[str, torch.Tensor]:
        if not self._made:
            raise RuntimeError("state() was called before finish()")
        state = self._made[0].state()
        is_floats = isinstance(self._made[0], nn.Module)
        return {f"floats.{name}": tensor for name, tensor in state.items()} if is_floats else state

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        shape = self._shape
        if any(name.startswith("floats.") for name in state):
            floats = self._as_floats()
            floats.restore({name.removeprefix("floats."): tensor for name, tensor in state.items()})
            self._made = (floats,)
        elif isinstance(self._make, SizedPacking):
            self._made = (self._make.restore(state, shape.in_features, shape.out_features, shape.out_dtype),)
        else:
            raise ValueError("packed weights cannot be taken back here")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._made:
            raise RuntimeError(
                "a linear layer was used before finish(); call models.filling.finish(model) after loading"
            )
        return self._made[0](x)


def floats_of(scheme: LinearScheme, shape: PackedShape, out_dtype: torch.dtype | None) -> Callable[[], StoredLinear]:
    """Makes the layer that keeps a weight of this shape as floats."""
    return lambda: scheme.create(shape.in_features, shape.out_features, bias=shape.bias, out_dtype=out_dtype)


def zeros(kind: str, rows: int, inputs: int) -> QuantizedRows:
    """Rows of zeros, of kind int8 or int8_half."""
    groups = -(-inputs // 32)
    scale = torch.zeros(rows) if KINDS[kind].span is None else torch.zeros(rows, groups, dtype=torch.float16)
    return QuantizedRows(kind=kind, q=torch.full((rows, inputs), 128, dtype=torch.uint8), scale=scale)


def float_rows(piece: Piece, share: Share, first: int, count: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Rows `first` .. `first + count` of our share as floats: [count, columns]."""
    rows = piece.rows(share.source_row + first, count, dtype)
    return rows[:, share.source_column : share.source_column + share.columns]
