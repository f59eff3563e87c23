"""How a weight is stored and multiplied by: the protocols, and the scheme that stores it as it is.

Promises: layers know shapes and shards, schemes know bytes; a weight is read and repacked in one go, in `finish`, so
that loading never holds more than the packed weights and one linear layer besides.
Does not know: file formats, or which layer a weight belongs to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

import torch
from torch import nn

from octavo.ops.pages import ModelMemory, scratch
from octavo.ops.registry import Linear, Multiply

_SLICE_BYTES: Final = 8 << 20  # of a weight that is read at once
_NOT_FLOATS: Final = frozenset(
    ("I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "BOOL", "C64", "F4", "F8_E4M3", "F8_E5M2", "F8_E8M0")
)  # packed numbers, or such as need a scale
_KINDS: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int8: "I8",
    torch.int16: "I16", torch.int32: "I32", torch.int64: "I64", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


# ---- what a checkpoint brings -------------------------------------------------------------------


@runtime_checkable
class Piece(Protocol):
    """One tensor of a checkpoint, whole, under Hugging Face's order of rows. It is read when asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def kind(self) -> str:
        """How it is stored, in the file's words: BF16, F32, Q4_0, ..."""

    def rows(self, first: int, count: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values of these rows, [count, ...], in `dtype` or as stored. May be a view of the file: only read it."""

    def raw(self, first: int, count: int) -> torch.Tensor | None:
        """These rows' blocks, [count, bytes of a row] uint8; None when the type has no blocks."""

    def forget(self) -> None:
        """Memory of the file's pages may go; they are read again when needed."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A tensor that is there already."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def kind(self) -> str:
        return _KINDS.get(self.tensor.dtype, str(self.tensor.dtype))

    def rows(self, first: int, count: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.tensor[first : first + count].to(dtype or self.tensor.dtype)

    def raw(self, first: int, count: int) -> None:
        return None

    def forget(self) -> None: ...


def as_piece(weight: torch.Tensor | Piece) -> Piece:
    """A tensor as a piece."""
    return TensorPiece(weight) if isinstance(weight, torch.Tensor) else weight


class WrongKindError(ValueError):
    """A tensor is stored in a type that does not belong there."""


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of a checkpoint tensor this rank keeps, and where: all in units of weight rows and columns.

    Rows `source_row .. source_row + rows` and columns `source_column .. source_column + columns` of the
    checkpoint's tensor, which is [tensor_rows, tensor_columns] as a whole, go to our rows from `row` on.
    """

    row: int
    rows: int
    source_row: int
    source_column: int
    columns: int
    tensor_rows: int
    tensor_columns: int

    def whole(self, parameter: str) -> tuple[int, ...]:
        """The shape of a checkpoint's whole weight [rows, columns], or of its bias [rows]."""
        return (self.tensor_rows, self.tensor_columns) if parameter == "weight" else (self.tensor_rows,)


def check_shape(piece: Piece, shape: tuple[int, ...]) -> None:
    """Raises `ValueError` unless the tensor has this shape."""
    if tuple(piece.shape) != shape:
        raise ValueError(f"its shape is {list(piece.shape)}, the model's is {list(shape)}")


def check_kind(piece: Piece) -> None:
    """Raises `WrongKindError` unless the tensor is made of floats, in blocks or not."""
    if piece.kind in _NOT_FLOATS:
        raise WrongKindError(f"it has type {piece.kind}, but floats are needed there")


def check_floats(known: tuple[str, ...], parameter: str, piece: Piece, share: Share) -> None:
    """A weight [rows, columns] or a bias [rows] of floats. Raises `KeyError` or `ValueError`."""
    if parameter not in known:
        raise KeyError(parameter)
    check_kind(piece)
    check_shape(piece, share.whole(parameter))


def read_rows(into: torch.Tensor, piece: Piece, first: int, count: int, column: int = 0) -> None:
    """Fill `into` [count, columns] or [count] with rows from `first` on and columns from `column` on, a few MB at a
    time; the file's pages go back while going."""
    columns = into.shape[1] if into.dim() > 1 else 1
    step = max(1, _SLICE_BYTES // max(1, columns * into.element_size()))
    with torch.no_grad():
        for start in range(0, count, step):
            part = piece.rows(first + start, min(step, count - start), into.dtype)
            into[start : start + step].copy_(part[:, column : column + columns] if into.dim() > 1 else part)
            piece.forget()


# ---- what a scheme offers -----------------------------------------------------------------------


class StoredLinear(Protocol):
    """One linear layer's weight on this rank. An `nn.Module` that owns its memory.

    Its life: made (perhaps while models are built on meta, so it reserves nothing), `place` for each tensor, `finish`
    once all have come, then calls. Or `restore` instead of `place` and `finish`.
    """

    def parameter_names(self) -> tuple[str, ...]:
        """What the checkpoint stores of it, such as ("weight", "bias")."""

    def check(self, parameter: str, piece: Piece, share: Share) -> None:
        """Raises `ValueError` on a wrong shape, `WrongKindError` on a wrong type, `KeyError` on a name."""

    def place(self, parameter: str, piece: Piece, share: Share) -> None:
        """Remember this piece, checked; nothing is read and no memory is taken."""

    def finish(self) -> None:
        """All pieces are in: read them, repack for the kernel, forget them."""

    @property
    def num_bytes(self) -> int:
        """What it holds when finished; an estimate before the pieces are in."""

    def state(self) -> Mapping[str, torch.Tensor]:
        """After `finish`: all that `restore` needs. Raises `NotImplementedError` when there is no such form."""

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over tensors that `state` gave; they lie in large pages on cache lines and are kept as they are.

        Raises `KeyError` or `ValueError` for a state that is not its own.
        """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]; only after `finish` or `restore`."""


class LinearScheme(Protocol):
    """A way to store linear weights."""

    @property
    def name(self) -> str:
        """With every setting that changes the stored bytes."""

    def create(
        self, in_features: int, out_features: int, *, bias: bool, out_dtype: torch.dtype | None = None
    ) -> StoredLinear:
        """One weight [out, in] of this rank; its results are in `out_dtype`, the model's own type when None."""

    def notes(self) -> tuple[str, ...]:
        """What a reader of the start-up lines should know, after loading."""


# ---- stored as it is ----------------------------------------------------------------------------


class DenseLinear(nn.Module):
    """A weight in the model's own type.

    Owns: the pieces that have come, until `finish`; then `weight` [out, in] and `bias` [out] if the operator works on
    them in place, and what it made of them if not.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None,
        linear: Linear,
        memory: ModelMemory,
    ) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        self._sizes = (out_features, in_features)
        self._names = ("weight", "bias") if bias else ("weight",)
        self._dtype, self._out_dtype = dtype, out_dtype
        self._linear, self._memory = linear, memory
        self._pieces: list[tuple[str, Piece, Share]] = []
        self._multiply: Multiply | None = None

    def parameter_names(self) -> tuple[str, ...]:
        return self._names

    def check(self, parameter: str, piece: Piece, share: Share) -> None:
        check_floats(self._names, parameter, piece, share)

    def place(self, parameter: str, piece: torch.Tensor | Piece, share: Share) -> None:
        self.check(parameter, as_piece(piece), share)
        self._pieces.append((parameter, as_piece(piece), share))

    def finish(self) -> None:
        if self._multiply is not None:
            raise RuntimeError("finish() was called twice on a weight")
        weight, bias = self._read_weight(), self._read_bias()
        multiply = self._linear(weight, bias, self._out_dtype)
        if not multiply.packed:
            weight = self._memory.keep(weight)
            multiply = self._linear(weight, bias, self._out_dtype)
            self._hold(weight, bias)
        self._multiply = multiply
        for _, piece, _ in self._pieces:
            piece.forget()
        self._pieces.clear()

    def _read_weight(self) -> torch.Tensor:
        """The whole weight, in memory that may go; or the file's own, when that is all it takes."""
        parts = [(piece, share) for name, piece, share in self._pieces if name == "weight"]
        if len(parts) == 1 and self._memory.device.type == "cpu":
            piece, share = parts[0]
            whole = (share.rows, share.columns) == self._sizes and share.columns == share.tensor_columns
            if whole and piece.kind == _KINDS[self._dtype]:
                return piece.rows(share.source_row, share.rows, self._dtype)
        host = scratch(self._sizes, self._dtype)
        for piece, share in parts:
            read_rows(
                host[share.row : share.row + share.rows], piece, share.source_row, share.rows, share.source_column
            )
        return host.to(self._memory.device)

    def _read_bias(self) -> torch.Tensor | None:
        if "bias" not in self._names:
            return None
        bias = torch.zeros(self._sizes[0], dtype=self._dtype)
        for name, piece, share in self._pieces:
            if name == "bias":
                read_rows(bias[share.row : share.row + share.rows], piece, share.source_row, share.rows)
        return self._memory.keep(bias)

    def _hold(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def num_bytes(self) -> int:
        if self._multiply is not None and self._multiply.packed:
            return sum(t.numel() * t.element_size() for t in state_of(self._multiply).values())
        rows, columns = self._sizes
        bias = rows * (len(self._names) - 1) * self._dtype.itemsize
        if self._multiply is None and isinstance(self._linear, PackingLinear):
            return self._linear.packed_bytes(columns, rows, self._dtype) + bias
        return rows * columns * self._dtype.itemsize + bias

    def state(self) -> Mapping[str, torch.Tensor]:
        if self._multiply is None:
            raise RuntimeError("state() was called before finish()")
        if self._multiply.packed:
            return state_of(self._multiply)
        return {name: self.get_parameter(name).data for name in self._names}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        rows, columns = self._sizes
        if isinstance(self._linear, PackingLinear) and "packed" in state:
            self._multiply = self._linear.restore(state, columns, rows, self._dtype, self._out_dtype)
            return
        if set(state) != set(self._names) or tuple(state["weight"].shape) != self._sizes:
            raise ValueError(f"it holds {sorted(state)}, not a weight of {list(self._sizes)}")
        self._hold(state["weight"], state.get("bias"))
        self._multiply = self._linear(state["weight"], state.get("bias"), self._out_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._multiply is None:
            raise RuntimeError(
                "a linear layer was used before finish(); call models.filling.finish(model) after loading"
            )
        return self._multiply(x)


@runtime_checkable
class Stateful(Protocol):
    """A packed multiplication that can be saved."""

    def state(self) -> Mapping[str, torch.Tensor]:
        """The tensors that it works on."""


@runtime_checkable
class PackingLinear(Protocol):
    """A `Linear` that packs weights, knows how large they become, and takes what was packed before."""

    def packed_bytes(self, in_features: int, out_features: int, dtype: torch.dtype) -> int: ...

    def restore(
        self,
        state: Mapping[str, torch.Tensor],
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> Multiply:
        """The multiplication whose `state` this is, over these tensors themselves; "packed" is one of them."""


@runtime_checkable
class RowsLinear(Protocol):
    """A `Linear` whose multiplications give the rows of their weight too, so that nobody else has to keep it."""

    def gives_rows(self, dtype: torch.dtype) -> bool:
        """Whether those by weights of this type do; they are `GivesRows` then."""


@runtime_checkable
class GivesRows(Protocol):
    """A multiplication that knows its weight exactly."""

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Rows of the weight by index [T] int64; zeros where there is no such row."""


def state_of(multiply: Multiply) -> Mapping[str, torch.Tensor]:
    """A packed multiplication's tensors. Raises `NotImplementedError` when it does not show them."""
    if not isinstance(multiply, Stateful):
        raise NotImplementedError(f"{type(multiply).__name__} has no form to be saved in")
    return multiply.state()


@runtime_checkable
class NamedLinear(Protocol):
    """A `StoredLinear` that wants to know what a checkpoint calls it, before anything else is asked of it."""

    def named(self, names: tuple[str, ...]) -> None:
        """One name for each of the checkpoint's weights that are one matrix here."""


@runtime_checkable
class NamedScheme(Protocol):
    """A scheme that looks at the names of all layers."""

    def check_names(self, names: Sequence[str]) -> None:
        """Raises `ConfigError` when it was told of a layer that there is not."""


@dataclass(frozen=True, slots=True)
class Unquantized:
    """Weights as the checkpoint has them, converted to the model's type."""

    dtype: torch.dtype
    linear: Linear
    memory: ModelMemory = field(default_factory=ModelMemory)
    name: str = "unquantized"

    def create(
        self, in_features: int, out_features: int, *, bias: bool, out_dtype: torch.dtype | None = None
    ) -> DenseLinear:
        return DenseLinear(
            in_features,
            out_features,
            bias=bias,
            dtype=self.dtype,
            out_dtype=out_dtype,
            linear=self.linear,
            memory=self.memory,
        )

    def notes(self) -> tuple[str, ...]:
        return ()
