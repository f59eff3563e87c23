"""Weights rounded to int8 or int4 while they are read (QNT-5), layer by layer as a plan says.

Promises: each layer's weight is rounded a few MB at a time, straight into its packed form.
Does not know: what users call a scheme (see `config.quantization`), or how packed weights are multiplied.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from octavo.base.errors import ConfigError
from octavo.config.quantization import QuantKey, QuantPlan
from octavo.ops.quantized import QuantizedLinear, QuantizedRows, QuantizeRows
from octavo.quant.api import LinearScheme, Piece, Share, check_floats
from octavo.quant.packed import PackedLinear, PackedShape, Pieces, float_rows, floats_of

_AS_THEY_ARE: Final = ("F32", "BF16")  # types that are rounded without a conversion before


def kind_of(key: QuantKey) -> str:
    """The kind of integers that a key means; `config.quantization` lets no other through."""
    if key.weight == "int8":
        return "int8"
    return "int4_half" if key.symmetric else "int4_half_min"


@dataclass(frozen=True, slots=True)
class OnlinePacking:
    """Floats to the kind that the plan has for a layer's names."""

    plan: QuantPlan
    quantize: QuantizeRows

    def parameters(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return ("weight",)

    def check(self, parameter: str, piece: Piece, share: Share, names: tuple[str, ...]) -> None:
        check_floats(("weight", "bias"), parameter, piece, share)

    def likely_kind(self, names: tuple[str, ...]) -> str | None:
        return None if (key := key_for(self.plan, names)) is None else kind_of(key)

    def kind(self, pieces: Pieces, share: Share, names: tuple[str, ...]) -> str | None:
        return self.likely_kind(names)

    def rows(self, kind: str, pieces: Pieces, share: Share, first: int, count: int) -> QuantizedRows:
        piece = pieces["weight"]
        dtype = None if piece.kind in _AS_THEY_ARE else torch.float32
        return self.quantize(float_rows(piece, share, first, count, dtype), kind)


def key_for(plan: QuantPlan, names: tuple[str, ...]) -> QuantKey | None:
    """The key of a layer that may have several names, being several of the checkpoint's in one matrix.

    Raises `ConfigError` when the plan treats them differently.
    """
    keys = {plan.key_of(name) for name in names} if names else {plan.default}
    if len(keys) > 1:
        raise ConfigError(
            f"--quantization: {', '.join(names)} are one matrix here and must be treated alike; give the same for all"
        )
    return next(iter(keys))


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineScheme:
    """Rounds every layer's weight as a plan says; `floats` keeps those that it leaves out."""

    plan: QuantPlan
    dtype: torch.dtype
    multiply: QuantizedLinear
    quantize: QuantizeRows
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
            packing=OnlinePacking(self.plan, self.quantize),
            multiply=self.multiply,
            as_floats=floats_of(self.floats, shape, out_dtype),
        )

    def check_names(self, names: Sequence[str]) -> None:
        """The names of all layers are known: raises `ConfigError` for a pattern that matches none."""
        self.plan.check_names(names)

    def notes(self) -> tuple[str, ...]:
        return ()
