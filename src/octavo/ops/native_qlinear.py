"""Products with quantized weights on the native core: packed once in large pages, integers multiplied exactly.

Promises: one order of float steps for every output, so that a row's bits depend on nothing but the row; the packed
form is the same at every level of instructions. Types that the core has no code for go to `ops.quantized`.
Does not know: formats of files, or which instructions serve.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from octavo.ops import quantized
from octavo.ops.native import DTYPES, core, rows_apart
from octavo.ops.pages import PageArena
from octavo.ops.quantized import KINDS, PackedMultiply, QuantizedPart, QuantizedRows

SERVED: Final = (torch.float32, torch.bfloat16)
PANEL: Final = 32  # outputs packed together
LAYOUT: Final = "q1"  # changes when the packed form does


class PackedPart:
    """One part in memory. `scales` are float32 [rows rounded up to 32] for kind int8 and None for the others."""

    __slots__ = ("kind", "num_rows", "packed", "scales")

    def __init__(self, kind: str, num_rows: int, packed: torch.Tensor, scales: torch.Tensor | None) -> None:
        self.kind, self.num_rows, self.packed, self.scales = kind, num_rows, packed, scales


class NativeQuantizedMultiply:
    """[T, in] -> [T, out]. Rows of x may lie apart; the elements of a row must not.

    Owns: the packed parts and the bias in float32.
    """

    packed = True
    __slots__ = ("_bias", "_bias_at", "_in_features", "_num_parts", "_out_dtype", "_out_type", "_outputs", "_parts",
                 "_table", "_table_at")  # fmt: skip

    def __init__(
        self, parts: Sequence[PackedPart], in_features: int, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> None:
        self._parts = tuple(parts)
        self._bias = None if bias is None else bias.float().contiguous()
        self._bias_at = 0 if self._bias is None else self._bias.data_ptr()
        self._in_features = in_features
        self._outputs = sum(part.num_rows for part in parts)
        self._out_dtype, self._out_type = out_dtype, DTYPES[out_dtype]
        self._num_parts = len(self._parts)
        self._table = _table(self._parts)
        self._table_at = self._table.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        stride, step = x.stride()
        if step != 1 or x.dtype not in SERVED:
            x = x.to(x.dtype if x.dtype in SERVED else torch.float32).contiguous()
            stride = self._in_features
        rows = x.shape[0]
        out = rows_apart(rows, self._outputs, self._out_dtype)
        core.qlinear(
            self._table_at, self._num_parts, self._bias_at, x.data_ptr(), DTYPES[x.dtype], stride, out.data_ptr(),
            self._out_type, out.stride(0), rows, self._in_features,
        )  # fmt: skip
        return out

    @property
    def num_bytes(self) -> int:
        tensors = self.state().values()
        return sum(t.numel() * t.element_size() for t in tensors)

    def state(self) -> dict[str, torch.Tensor]:
        """By part "<number>.<kind>.<rows>.<what>", and "bias" where there is one; `NativeQuantizedLinear.restore` takes it."""
        out: dict[str, torch.Tensor] = {}
        for number, part in enumerate(self._parts):
            out[f"{number}.{part.kind}.{part.num_rows}.packed"] = part.packed
            if part.scales is not None:
                out[f"{number}.{part.kind}.{part.num_rows}.scales"] = part.scales
        return out if self._bias is None else {**out, "bias": self._bias}


class NativeQuantizedLinear:
    """Makes the product with one quantized weight.

    Owns: the large pages that its packed weights lie in.
    """

    layout = LAYOUT

    def __init__(self) -> None:
        self._arena = PageArena("packed weights")

    def __call__(
        self, parts: Sequence[QuantizedPart], in_features: int, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> PackedMultiply:
        if out_dtype not in SERVED:
            return quantized.quantized_linear(parts, in_features, bias, out_dtype)
        packed = [self._pack(part, in_features) for part in parts]
        return NativeQuantizedMultiply(packed, in_features, bias, out_dtype)

    def _pack(self, part: QuantizedPart, in_features: int) -> PackedPart:
        memory = self._arena.take(self.packed_bytes(part.kind, part.num_rows, in_features))
        scales = None
        if part.kind == "int8":
            scales = self._arena.take(-(-part.num_rows // PANEL) * PANEL * 4).view(torch.float32)
        first = 0
        for rows in part.chunks:
            _pack_rows(rows, first, memory, in_features)
            if scales is not None:
                scales[first : first + len(rows.q)] = rows.scale
            first += len(rows.q)
        if first != part.num_rows:
            raise ValueError(f"a part of {part.num_rows} rows was given {first}")
        return PackedPart(part.kind, part.num_rows, memory, scales)

    @staticmethod
    def packed_bytes(kind: str, num_rows: int, in_features: int) -> int:
        """Bytes of one packed part, without kind int8's 4 bytes of scale for each row."""
        return int(core.qlinear_packed_bytes(KINDS[kind].number, num_rows, in_features))

    @staticmethod
    def restore(
        state: Mapping[str, torch.Tensor], in_features: int, out_features: int, out_dtype: torch.dtype
    ) -> NativeQuantizedMultiply:
        """The multiplication whose `state` this was; its tensors are kept, not copied, and start on cache lines.

        Raises `KeyError` or `ValueError` when it is not the state of a weight of this shape.
        """
        parts: dict[int, PackedPart] = {}
        for name, tensor in state.items():
            if not name.endswith(".packed"):
                continue
            number, kind, rows, _ = name.split(".")
            scales = state[f"{number}.{kind}.{rows}.scales"] if kind == "int8" else None
            want = NativeQuantizedLinear.packed_bytes(kind, int(rows), in_features)
            if tensor.numel() != want or tensor.data_ptr() % 64:
                raise ValueError(f"{rows} x {in_features} numbers of kind {kind} cannot have {tensor.numel()} bytes")
            parts[int(number)] = PackedPart(kind, int(rows), tensor, scales)
        ordered = [parts[number] for number in range(len(parts))]
        if not ordered or sum(part.num_rows for part in ordered) != out_features:
            raise ValueError(f"its parts do not make {out_features} outputs")
        return NativeQuantizedMultiply(ordered, in_features, state.get("bias"), out_dtype)


def quantize_rows(weight: torch.Tensor, kind: str) -> QuantizedRows:
    """See `ops.quantized.quantize_rows`."""
    if weight.dtype not in SERVED or weight.device.type != "cpu" or kind not in ("int8", "int4_half"):
        return quantized.quantize_rows(weight, kind)
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    rows, inputs = weight.shape
    q = torch.empty(rows, inputs, dtype=torch.uint8)
    if kind == "int8":
        scale, make = torch.empty(rows), core.qlinear_quantize_int8
    else:
        scale, make = torch.empty(rows, -(-inputs // quantized.GROUP), dtype=torch.float16), core.qlinear_quantize_int4
    make(weight.data_ptr(), DTYPES[weight.dtype], weight.stride(0), rows, inputs, q.data_ptr(), scale.data_ptr())
    return QuantizedRows(kind=kind, q=q, scale=scale)


def _pack_rows(rows: QuantizedRows, first: int, memory: torch.Tensor, in_features: int) -> None:
    given = [None if t is None else t.contiguous() for t in (rows.scale, rows.minimum, rows.outer, rows.outer_minimum)]
    addresses = [0 if t is None else t.data_ptr() for t in given]
    q = rows.q.contiguous()
    core.qlinear_pack(
        KINDS[rows.kind].number, q.data_ptr(), *addresses, len(q), in_features, first, memory.data_ptr()
    )  # fmt: skip


def _table(parts: Sequence[PackedPart]) -> torch.Tensor:
    """The parts as `octavo/qlinear.h` has them: kind, outputs, first output, and two addresses."""
    out, first = [], 0
    for part in parts:
        scales = 0 if part.scales is None else part.scales.data_ptr()
        out.append([KINDS[part.kind].number, part.num_rows, first, part.packed.data_ptr(), scales])
        first += part.num_rows
    return torch.tensor(out, dtype=torch.int64)
