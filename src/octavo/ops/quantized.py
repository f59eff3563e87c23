"""Weights as small integers with scales, and the definition of the products with them, in plain torch.

Promises: what a kind's numbers mean is said once, here; the references below serve any device and are what faster
versions are tested against.
Does not know: how a faster version packs them, or which formats of files they come from (see `quant`).

Activations are rounded to int8 as well: for kind int8 with one scale for each row (token), for the others with one
for 32 inputs of a row. The products of integers are exact.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.nn.functional as F

GROUP: Final = 32  # inputs that share a scale, of weights and of activations
BLOCK: Final = 256  # inputs that share an outer scale
_TINY: Final = 1e-35  # activations below this are 0: the inverse of their scale would not be a number


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightKind:
    """How a weight's integers become numbers.

    value = (q - zero) * scale [+ minimum], with `scale` a number for each row (span None) or each `span` inputs. With
    `outer`, scale and minimum are small integers, times a number for 256 inputs: value = (q - zero) * scale * outer
    [- minimum * outer minimum].
    """

    number: int  # as `octavo/qlinear.h` counts them
    bits: int
    zero: int
    span: int | None
    outer: bool = False
    minimum: bool = False


KINDS: Final[Mapping[str, WeightKind]] = {
    "int8": WeightKind(number=0, bits=8, zero=128, span=None),
    "int8_half": WeightKind(number=1, bits=8, zero=128, span=32),
    "int8_half_min": WeightKind(number=2, bits=8, zero=0, span=32, minimum=True),
    "int8_k": WeightKind(number=3, bits=8, zero=128, span=16, outer=True),
    "int8_k_min": WeightKind(number=4, bits=8, zero=0, span=32, outer=True, minimum=True),
    "int4_half": WeightKind(number=5, bits=4, zero=8, span=32),
    "int4_half_min": WeightKind(number=6, bits=4, zero=0, span=32, minimum=True),
    "int4_k_min": WeightKind(number=7, bits=4, zero=0, span=32, outer=True, minimum=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedRows:
    """Rows of a weight in plain order.

    q [rows, inputs] uint8. scale: float32 [rows] for kind int8; float16 [rows, groups]; or with outer scales int8 (uint8
    where there are minima) [rows, inputs / span]. minimum as scale, [rows, groups]. outer and outer_minimum: float16
    [rows, inputs / 256].
    """

    kind: str
    q: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None = None
    outer: torch.Tensor | None = None
    outer_minimum: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """The weight that they stand for: [rows, inputs] float32."""
        kind, inputs = KINDS[self.kind], self.q.shape[1]
        numbers = self.q.float() - kind.zero
        if kind.span is None:
            return numbers * self.scale[:, None]
        scale = self.scale.float().repeat_interleave(kind.span, 1)
        if self.outer is not None:
            scale = scale * self.outer.float().repeat_interleave(BLOCK, 1)
        numbers = numbers * scale[:, :inputs]
        if self.minimum is None:
            return numbers
        minimum = self.minimum.float().repeat_interleave(GROUP, 1)
        if self.outer_minimum is not None:
            minimum = -(minimum * self.outer_minimum.float().repeat_interleave(BLOCK, 1))
        return numbers + minimum[:, :inputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedPart:
    """Some outputs of a weight, all of one kind; their rows come in order, a chunk at a time, when they are packed."""

    kind: str
    num_rows: int
    chunks: Iterable[QuantizedRows]


class PackedMultiply(Protocol):
    """A product with a weight of one or more parts: [T, in] -> [T, out]."""

    @property
    def packed(self) -> bool: ...

    @property
    def num_bytes(self) -> int:
        """Memory that the weight takes."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def state(self) -> Mapping[str, torch.Tensor]:
        """All that `restore` needs. Raises `NotImplementedError` when there is no such form."""


class QuantizedLinear(Protocol):
    """Makes the product with one weight: its outputs are those of the parts, in order."""

    def __call__(
        self, parts: Sequence[QuantizedPart], in_features: int, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> PackedMultiply: ...


class QuantizeRows(Protocol):
    """Rounds a float weight [rows, inputs] to kind int8, int4_half or int4_half_min."""

    def __call__(self, weight: torch.Tensor, kind: str) -> QuantizedRows: ...


# ---- rounding -----------------------------------------------------------------------------------


def quantize_rows(weight: torch.Tensor, kind: str) -> QuantizedRows:
    """Integers nearest to a float weight [rows, inputs], and their scales.

    int8: the largest of a row becomes 127 or -127. int4_half: of some scales for 32 inputs, which take the largest to
    an end of the range or a little beyond it, and are mended by least squares, the one that misses least in squares.
    int4_half_min: the least of a group becomes 0 and the largest 15.
    """
    weight = weight.float()
    if kind == "int8":
        most = weight.abs().amax(1)
        inverse, scale = _inverse_and_scale(most)
        q = (weight * inverse[:, None]).round().clamp(-127, 127)
        return QuantizedRows(kind=kind, q=(q + 128).to(torch.uint8), scale=scale)
    if kind not in ("int4_half", "int4_half_min"):
        raise ValueError(f"floats are not rounded to {kind}")
    groups, minimum = _in_groups(weight), None
    if kind == "int4_half":
        q, scales = _nearest_int4(groups)
        q = q + 8
    else:
        low = groups.amin(1, keepdim=True).half()
        scales, minimum = _as_half((groups.amax(1, keepdim=True) - low.float()) / 15), low.view(len(weight), -1)
        q = ((groups - low.float()) / torch.where(scales == 0, 1.0, scales)).round().clamp(0, 15)
    q = q.to(torch.uint8).view(len(weight), -1)[:, : weight.shape[1]].contiguous()
    return QuantizedRows(kind=kind, q=q, scale=scales.view(len(weight), -1).half(), minimum=minimum)


_RANGES: Final = (-8.0, -8.6, -9.3, -7.4, 7.0, 7.6)  # where the largest number of a group goes; -8 .. 7 can be stored


def _nearest_int4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, 32] floats to integers in -8..7 and scales [n, 1], which float16 can hold."""
    extreme = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    best = torch.full_like(extreme, torch.inf)
    found = torch.zeros_like(extreme)
    for at in _RANGES:
        tried = _as_half(extreme / at)
        for _ in range(2):
            whole = _whole_int4(groups, tried)
            missed = (groups - whole * tried).square().sum(1, keepdim=True)
            better = missed < best
            best, found = torch.where(better, missed, best), torch.where(better, tried, found)
            squares = whole.square().sum(1, keepdim=True)
            mended = _as_half((groups * whole).sum(1, keepdim=True) / squares)
            tried = torch.where(squares > 0, mended, tried)
    return _whole_int4(groups, found), found


def _whole_int4(groups: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    return (groups * inverse).round().clamp(-8, 7)


def _as_half(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-65504.0, 65504.0).half().float()


def _in_groups(x: torch.Tensor) -> torch.Tensor:
    """[rows, inputs] to [rows * groups, 32], the last group of a row filled up with 0."""
    return F.pad(x, (0, -x.shape[1] % GROUP)).reshape(-1, GROUP)


def _inverse_and_scale(most: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    something, top = ~(most < _TINY), torch.full_like(most, 127.0)  # a number over a tensor would not be one division
    return torch.where(something, top / most, 0.0), torch.where(something, most / top, 0.0)


def round_activations(x: torch.Tensor, by_row: bool) -> torch.Tensor:
    """Activations [T, inputs] as what their int8 numbers stand for, float32."""
    rows = x.float() if by_row else _in_groups(x.float())
    inverse, scale = _inverse_and_scale(rows.abs().amax(1, keepdim=True))
    rounded = (rows * inverse).round() * scale
    return rounded if by_row else rounded.view(len(x), -1)[:, : x.shape[1]]


# ---- multiplying --------------------------------------------------------------------------------


class ReferenceMultiply:
    """The product by the weight's values, computed anew at every call.

    Owns: the rows and the bias.
    """

    packed = True

    def __init__(self, rows: Sequence[QuantizedRows], bias: torch.Tensor | None, out_dtype: torch.dtype) -> None:
        self._rows = tuple(rows)
        self._bias = None if bias is None else bias.float()
        self._out_dtype = out_dtype

    @property
    def num_bytes(self) -> int:
        tensors = [t for r in self._rows for t in (r.q, r.scale, r.minimum, r.outer, r.outer_minimum) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = round_activations(x, by_row=KINDS[self._rows[0].kind].span is None)
        out = torch.cat([F.linear(x, rows.values()) for rows in self._rows], dim=1)
        return (out if self._bias is None else out + self._bias).to(self._out_dtype)

    def state(self) -> Mapping[str, torch.Tensor]:
        raise NotImplementedError("the reference keeps its weights unpacked")


def quantized_linear(
    parts: Sequence[QuantizedPart], in_features: int, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> ReferenceMultiply:
    """The product with a quantized weight, rounded once to `out_dtype`. See `QuantizedLinear`."""
    del in_features  # the rows say it
    return ReferenceMultiply([rows for part in parts for rows in part.chunks], bias, out_dtype)
