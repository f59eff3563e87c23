"""compressed-tensors checkpoints of int8 weights with one scale a channel and dynamic int8 activations.

Promises: the checkpoint's integers and scales are used as they are. Layers that it leaves out are kept as floats.
Does not know: other forms of that format: `config.quantization` refuses them.

Source: the format's own names, https://github.com/neuralmagic/compressed-tensors: `weight` int8 [out, in], `weight_scale`
[out, 1] or [out].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from octavo.config.quantization import QuantPlan
from octavo.ops.quantized import QuantizedLinear, QuantizedRows
from octavo.quant.api import LinearScheme, Piece, Share, WrongKindError, check_floats, check_shape
from octavo.quant.online import key_for
from octavo.quant.packed import PackedLinear, PackedShape, Pieces, float_rows, floats_of

WEIGHT, SCALE = "weight", "weight_scale"


@dataclass(frozen=True, slots=True)
class CompressedPacking:
    """Integers and scales as they are stored; floats where the plan ignores a layer."""

    plan: QuantPlan

    def _is_int8(self, names: tuple[str, ...]) -> bool:
        return key_for(self.plan, names) is not None

    def parameters(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return (WEIGHT, SCALE) if self._is_int8(names) else (WEIGHT,)

    def check(self, parameter: str, piece: Piece, share: Share, names: tuple[str, ...]) -> None:
        if parameter == SCALE:
            rows = share.tensor_rows
            check_shape(piece, (rows,) if len(piece.shape) == 1 else (rows, 1))
        elif parameter == WEIGHT and self._is_int8(names):
            if piece.kind != "I8":
                raise WrongKindError(f"it has type {piece.kind}, but config.json's quantization_config says int8")
            check_shape(piece, share.whole(parameter))
        else:
            check_floats((WEIGHT, "bias"), parameter, piece, share)

    def likely_kind(self, names: tuple[str, ...]) -> str | None:
        return "int8" if self._is_int8(names) else None

    def kind(self, pieces: Pieces, share: Share, names: tuple[str, ...]) -> str | None:
        return self.likely_kind(names)

    def rows(self, kind: str, pieces: Pieces, share: Share, first: int, count: int) -> QuantizedRows:
        q = float_rows(pieces[WEIGHT], share, first, count)
        scale = pieces[SCALE].rows(share.source_row + first, count, torch.float32).reshape(-1)
        return QuantizedRows(kind=kind, q=q.contiguous().view(torch.uint8) ^ 128, scale=scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedScheme:
    """int8 as the checkpoint has it; `floats` keeps what it ignores."""

    plan: QuantPlan
    dtype: torch.dtype
    multiply: QuantizedLinear
    floats: LinearScheme

    @property
    def name(self) -> str:
        return repr(self.plan)

    def create(
        self, in_features: int, out_features: int, *, bias: bool, out_dtype: torch.dtype | None = None
    ) -> PackedLinear:
        shape = PackedShape(
            in_features=in_features, out_features=out_features, bias=bias, out_dtype=out_dtype or self.dtype
        )
        return PackedLinear(
            shape,
            packing=CompressedPacking(self.plan),
            multiply=self.multiply,
            as_floats=floats_of(self.floats, shape, out_dtype),
        )

    def check_names(self, names: Sequence[str]) -> None:
        """A checkpoint may ignore layers that a part of its family has: nothing is refused."""

    def notes(self) -> tuple[str, ...]:
        return ()
