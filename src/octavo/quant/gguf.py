"""A GGUF file's weights computed as they are: its blocks are repacked once and no value changes.

Promises: the types in `gguf_rows.KIND_OF` stay as small as they are, or become int8 in groups without loss; others are
decoded to floats, and `notes` says which and how many tensors.
Does not know: files or names.
"""

from collections import Counter
from dataclasses import dataclass, field

import torch

from octavo.ops.quantized import QuantizedLinear, QuantizedRows
from octavo.quant.api import LinearScheme, Piece, Share, check_floats
from octavo.quant.gguf_rows import BLOCKS, KIND_OF, quantized_rows
from octavo.quant.packed import PackedLinear, PackedShape, Pieces, floats_of


class Seen:
    """Which types a checkpoint's linear weights have.

    Owns: the type of each tensor that was shown, by its name.
    """

    def __init__(self) -> None:
        self._types: dict[object, str] = {}

    def add(self, piece: Piece) -> None:
        self._types[getattr(piece, "stored_name", id(piece))] = piece.kind

    def text(self) -> str:
        """`Q4_1 (210 tensors) and Q8_0 (1) computed as they are; F16 (2) as floats`."""
        counts = Counter(self._types.values())
        same = {
            kind: n
            for kind, n in counts.items()
            if KIND_OF.get(kind, "").startswith("int4") or kind in ("Q8_0", "Q6_K")
        }
        wider = {kind: n for kind, n in counts.items() if kind in KIND_OF and kind not in same}
        floats = {kind: n for kind, n in counts.items() if kind not in KIND_OF}
        parts = [(same, "computed as they are"), (wider, "as int8 in groups, without loss"), (floats, "as floats")]
        return "; ".join(f"{_listed(group)} {how}" for group, how in parts if group)


def _listed(counts: dict[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    words = [f"{kind} ({n} tensors)" if i == 0 else f"{kind} ({n})" for i, (kind, n) in enumerate(ordered)]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


@dataclass(frozen=True, slots=True)
class GGUFPacking:
    """Blocks to the kinds that hold the same values."""

    seen: Seen

    def parameters(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return ("weight",)

    def check(self, parameter: str, piece: Piece, share: Share, names: tuple[str, ...]) -> None:
        check_floats(("weight", "bias"), parameter, piece, share)
        if parameter == "weight":
            self.seen.add(piece)

    def likely_kind(self, names: tuple[str, ...]) -> str | None:
        return "int4_half_min"

    def kind(self, pieces: Pieces, share: Share, names: tuple[str, ...]) -> str | None:
        name = pieces["weight"].kind
        if name not in KIND_OF:
            return None
        size = BLOCKS[name].block_size  # a rank's columns must be whole blocks
        return None if share.source_column % size or share.columns % size else KIND_OF[name]

    def rows(self, kind: str, pieces: Pieces, share: Share, first: int, count: int) -> QuantizedRows:
        piece = pieces["weight"]
        block = BLOCKS[piece.kind]
        raw = piece.raw(share.source_row + first, count)
        if raw is None:
            raise ValueError(f"a tensor of type {piece.kind} shows no blocks")
        begin, size = share.source_column // block.block_size, share.columns // block.block_size
        return quantized_rows(raw[:, begin * block.block_bytes : (begin + size) * block.block_bytes], piece.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFScheme:
    """Keeps each weight in the form that its type has here; `floats` keeps those that have none."""

    dtype: torch.dtype
    multiply: QuantizedLinear
    floats: LinearScheme
    name: str = "gguf"
    seen: Seen = field(default_factory=Seen)

    def create(
        self, in_features: int, out_features: int, *, bias: bool, out_dtype: torch.dtype | None = None
    ) -> PackedLinear:
        shape = PackedShape(
            in_features=in_features, out_features=out_features, bias=bias, out_dtype=out_dtype or self.dtype
        )
        return PackedLinear(
            shape,
            packing=GGUFPacking(self.seen),
            multiply=self.multiply,
            as_floats=floats_of(self.floats, shape, out_dtype),
        )

    def notes(self) -> tuple[str, ...]:
        text = self.seen.text()
        return (f"weights of GGUF types {text}",) if text else ()
