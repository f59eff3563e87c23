"""The linear product on the native core: weights in bf16 and float32, packed once in large pages.

Promises: sums in float32 in one order for every number of rows and threads, so that a row's bits depend on nothing
but the row; the bias is added before the one rounding at the end. Types and devices that the core has no code for are
given to `ops.reference`.
Does not know: which instructions serve (the level in use when the weight is packed must stay in use).
"""

from collections.abc import Mapping
from typing import Final

import torch

from octavo.ops import reference
from octavo.ops.native import DTYPES, core, rows_apart
from octavo.ops.pages import PageArena
from octavo.ops.registry import Multiply

SERVED: Final = (torch.float32, torch.bfloat16)


class NativeMultiply:
    """[T, in] -> [T, out] by one packed weight. Rows of x may lie apart; the elements of a row must not.

    Owns: the packed weight and the bias in float32.
    """

    packed = True
    __slots__ = ("_bias", "_bias_at", "_dtype", "_inputs", "_out_dtype", "_outputs", "_packed", "_packed_at", "_types")

    def __init__(
        self,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self._packed = packed
        self._bias = None if bias is None else bias.float().contiguous()
        self._packed_at = packed.data_ptr()
        self._bias_at = 0 if self._bias is None else self._bias.data_ptr()
        self._inputs = in_features
        self._outputs = out_features
        self._dtype = dtype
        self._out_dtype = out_dtype or dtype
        self._types = (DTYPES[dtype], DTYPES[self._out_dtype])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        stride, step = x.stride()
        if step != 1:
            x = x.contiguous()
            stride = self._inputs
        rows = x.shape[0]
        out = rows_apart(rows, self._outputs, self._out_dtype)
        core.linear(
            x.data_ptr(),
            stride,
            self._packed_at,
            self._bias_at,
            out.data_ptr(),
            out.stride(0),
            rows,
            self._inputs,
            self._outputs,
            *self._types,
        )
        return out

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Rows of the weight by index (int64), as they were before they were packed; `reference.gather_rows`."""
        index = index.contiguous()
        count = index.shape[0]
        out = torch.empty((count, self._inputs), dtype=self._dtype)
        core.linear_rows(
            self._packed_at, index.data_ptr(), out.data_ptr(), count, self._inputs, self._outputs, self._types[0]
        )
        return out

    def state(self) -> dict[str, torch.Tensor]:
        """What `NativeLinear.restore` needs of it: "packed" (bytes of the level in use) and, where there is one, "bias"."""
        return {"packed": self._packed} if self._bias is None else {"packed": self._packed, "bias": self._bias}


class NativeLinear:
    """Makes the multiplication by one weight.

    Owns: the large pages that its packed weights lie in.
    """

    def __init__(self) -> None:
        self._arena = PageArena("packed weights")

    def __call__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> Multiply:
        served = weight.dtype in SERVED and (out_dtype is None or out_dtype in SERVED)
        if not served or weight.device.type != "cpu":
            return reference.linear(weight, bias, out_dtype)
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        outputs, inputs = weight.shape
        kind = DTYPES[weight.dtype]
        packed = self._arena.take(core.linear_packed_bytes(inputs, outputs, kind))
        core.linear_pack(weight.data_ptr(), weight.stride(0), packed.data_ptr(), inputs, outputs, kind)
        return NativeMultiply(packed, bias, inputs, outputs, weight.dtype, out_dtype)

    @staticmethod
    def gives_rows(dtype: torch.dtype) -> bool:
        """True when the multiplication by a weight of this type can give the weight's `rows`."""
        return dtype in SERVED

    @staticmethod
    def layout(dtype: torch.dtype) -> str:
        """The name of the packed form at the level in use: what is stored under another name cannot be restored."""
        return str(core.linear_layout(DTYPES[dtype]))

    @staticmethod
    def packed_bytes(in_features: int, out_features: int, dtype: torch.dtype) -> int:
        """Bytes of a packed weight at the level in use."""
        return int(core.linear_packed_bytes(in_features, out_features, DTYPES[dtype]))

    @staticmethod
    def restore(
        state: Mapping[str, torch.Tensor],
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> NativeMultiply:
        """The multiplication whose `state` this was; its tensors are kept, not copied.

        "packed" must start on a cache line, and `layout` must be what it was when it was packed. Raises `ValueError`
        when its size is not that of this shape.
        """
        packed = state["packed"]
        if packed.numel() != NativeLinear.packed_bytes(in_features, out_features, dtype) or packed.data_ptr() % 64:
            raise ValueError(f"a packed weight of {in_features} x {out_features} cannot have {packed.numel()} bytes")
        return NativeMultiply(packed, state.get("bias"), in_features, out_features, dtype, out_dtype)
