"""GGUF's block types as integers and scales of the kinds that products are computed with.

Promises: no value changes: `QuantizedRows.values()` is what `gguf_blocks.dequantize` gives, to the bit; types that have no
such form are not in `KIND_OF`.
Does not know: files or names, or how integers are packed.

The block structures are those of `gguf_blocks`; a function here takes [n, block_bytes] bytes, n blocks in the order of
`rows` rows of `inputs`.
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch

from octavo.base.gguf import GGML_TYPES
from octavo.ops.quantized import QuantizedRows
from octavo.quant.gguf_blocks import NONLINEAR, fifth_bits, k_scales, unpack

BLOCKS: Final = {kind.name: kind for kind in GGML_TYPES.values()}
_LEVELS: Final = (NONLINEAR + 128).to(torch.uint8)
_TERNARY_REPEATS: Final = 8  # groups of 32 in a block with one scale

KIND_OF: Final[Mapping[str, str]] = {
    "Q4_0": "int4_half", "Q4_1": "int4_half_min", "Q8_0": "int8_half", "Q4_K": "int4_k_min", "Q6_K": "int8_k",
    "Q5_0": "int8_half", "Q5_1": "int8_half_min", "Q5_K": "int8_k_min", "Q3_K": "int8_k", "IQ4_NL": "int8_half",
    "IQ4_XS": "int8_k", "TQ2_0": "int4_half",
}  # fmt: skip


def quantized_rows(raw: torch.Tensor, kind: str) -> QuantizedRows:
    """Rows of blocks [rows, bytes of a row] of a GGUF type in `KIND_OF`."""
    block = BLOCKS[kind]
    q, fields = _READERS[kind](raw.reshape(-1, block.block_bytes))
    rows = len(raw)
    return QuantizedRows(
        kind=KIND_OF[kind], q=q.reshape(rows, -1), **{name: value.reshape(rows, -1) for name, value in fields.items()}
    )


_Fields = dict[str, torch.Tensor]
_Reader = Callable[[torch.Tensor], tuple[torch.Tensor, _Fields]]


def _f16(field: torch.Tensor) -> torch.Tensor:
    return field.contiguous().view(torch.float16)


def _q4_0(b: torch.Tensor) -> tuple[torch.Tensor, _Fields]:
    return unpack(b[:, 2:], 4, 16), {"scale": _f16(b[:, :2])}


def _q4_1(b: torch.Tensor) -> tuple[torch.Tensor, _Fields]:
    return unpack(b[:, 4:], 4, 16), {"scale": _f16(b[:, :2]), "minimum": _f16(b[:, 2:4])}


def _q5_0(b: torch.Tensor) -> tuple[torch.Tensor, _Fields]:
    return (unpack(b[:, 6:], 4, 16) | fifth_bits(b[:, 2:6])) + 112, {"scale": _f16(b[:, :2])}  # 16 is 0 there, 128 here


def _q5_1(b: torch.Tensor) -> tuple[torch.Tensor, _Fields]:
    q = unpack(b[:, 8:], 4, 16) | fifth_bits(b[:, 4:8])
    return q, {"scale": _f16(b[:, :2]), "minimum": _f16(b[:, 2:4])}


def _q8_0(b: torch.Tensor) -> tuple[torch.Tensor, _Fields]:
    return b[:, 2:] ^ 128, {"scale": _f16(b[:, :2])}


def _iq4_nl(b: torch.Tensor) -> tuple[torch.Tensor, _Fields]:
    return _LEVELS[unpack(b[:, 2:], 4, 16).int()], {"scale": _f16(b[:, :2])}


def _tq2_0(b: torch.Tensor) -> tuple[torch.Tensor, _Fields]:
    return unpack(b[:, :64], 2, 32) + 7, {"scale": _f16(b[:, 64:66]).repeat_interleave(_TERNARY_REPEATS, 1)}


def _k_fields(b: torch.Tensor) -> _Fields:
    scale, minimum = k_scales(b)
    return {"scale": scale, "minimum": minimum, "outer": _f16(b[:, :2]), "outer_minimum": _f16(b[:, 2:4])}


def _q4_k(b: torch.Tensor) -> tuple[torch.Tensor, _Fields]:
    return unpack(b[:, 16:], 4, 32), _k_fields(b)


def _q5_k(b: torch.Tensor) -> tuple[torch.Tensor, _Fields]:
    return unpack(b[:, 48:], 4, 32) | (unpack(b[:, 16:48], 1, 32) << 4), _k_fields(b)


def _q6_k(b: torch.Tensor) -> tuple[torch.Tensor, _Fields]:
    q = unpack(b[:, :128], 4, 64) | (unpack(b[:, 128:192], 2, 32) << 4)
    return q + 96, {"scale": b[:, 192:208].contiguous().view(torch.int8), "outer": _f16(b[:, 208:210])}


def _q3_k(b: torch.Tensor) -> tuple[torch.Tensor, _Fields]:
    low, high = unpack(b[:, 96:104], 4, 8), unpack(b[:, 104:108], 2, 4)
    scale = (low | (high << 4)).view(torch.int8) - 32
    q = unpack(b[:, 32:96], 2, 32) + (unpack(b[:, :32], 1, 32) << 2)  # 4 is 0 there
    return q + 124, {"scale": scale, "outer": _f16(b[:, 108:110])}


def _iq4_xs(b: torch.Tensor) -> tuple[torch.Tensor, _Fields]:
    low, high = unpack(b[:, 4:8], 4, 1), unpack(b[:, 2:4], 2, 1)
    scale = ((low | (high << 4)).view(torch.int8) - 32).repeat_interleave(2, 1)  # one for 32 there, for 16 here
    return _LEVELS[unpack(b[:, 8:], 4, 16).int()], {"scale": scale, "outer": _f16(b[:, :2])}


_READERS: Final[Mapping[str, _Reader]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q6_K": _q6_k, "Q5_0": _q5_0, "Q5_1": _q5_1,
    "Q5_K": _q5_k, "Q3_K": _q3_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "TQ2_0": _tq2_0,
}  # fmt: skip
