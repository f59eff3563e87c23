"""Decoding of GGUF's block types to floats, in vectorized torch.

Promises: every value equals what the format's reference decoder gives, computed in single precision; memory beyond
the result is a few MB, whatever the tensor's size.
Does not know: files or names (see `base.gguf`), or how to multiply by blocks without decoding them.

Sources: the block structures in https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h; MXFP4 from the OCP
Microscaling Formats specification 1.0. A block's fields are written here as byte ranges of its row.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import torch

from octavo.base.errors import LoadError
from octavo.base.gguf import GGMLType
from octavo.base.mapped import Bytes
from octavo.base.packages import install_command

_CHUNK = 1 << 19  # elements decoded at once: intermediate results stay in the cache
_PLAIN: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip


def dequantize(
    data: Bytes, kind: GGMLType, shape: Sequence[int], *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A tensor of `shape` and `dtype` from its stored bytes.

    Plain types come back without a copy when the dtype is theirs: then the result shares `data`'s memory.
    Raises `LoadError` for a type that cannot be decoded.
    """
    raw = torch.from_numpy(data)
    if kind.name in _PLAIN:
        return raw.view(_PLAIN[kind.name]).view(*shape).to(dtype)
    decode = DECODERS.get(kind.name)
    if decode is None:
        return _by_reference(data, kind, shape, dtype)
    blocks = raw.view(-1, kind.block_bytes)
    out = torch.empty(len(blocks), kind.block_size, dtype=dtype)
    step = _CHUNK // kind.block_size
    for start in range(0, len(blocks), step):
        out[start : start + step] = decode(blocks[start : start + step])
    return out.view(*shape)


def _by_reference(data: Bytes, kind: GGMLType, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Types with large code books, which are not repeated here, through the optional `gguf` package."""
    try:
        gguf = importlib.import_module("gguf")
        number = gguf.GGMLQuantizationType[kind.name]
        values = gguf.dequantize(data.reshape(-1, kind.block_bytes), number)
    except ImportError:
        raise LoadError(
            f"GGUF type {kind.name} needs the package gguf: take another quantization, or {install_command('gguf')}"
        ) from None
    except (KeyError, NotImplementedError):
        known = ", ".join((*_PLAIN, *DECODERS))
        raise LoadError(f"GGUF type {kind.name} is not supported; use one of {known}") from None
    return torch.from_numpy(np.ascontiguousarray(values)).view(*shape).to(dtype)


# ---- fields of a block ------------------------------------------------------------------------


def half(field: torch.Tensor) -> torch.Tensor:
    """Half-precision numbers: [n, 2k] bytes to [n, k] floats."""
    return field.contiguous().view(torch.float16).float()


def unpack(field: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Numbers of `bits` bits: each run of `group` bytes holds all lowest parts first, then the next ones, and so on.

    [n, bytes] to [n, bytes * 8 / bits] small integers.
    """
    runs = field.reshape(len(field), -1, 1, group)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(1, 1, -1, 1)
    return ((runs >> shifts) & ((1 << bits) - 1)).view(len(field), -1)


def _scaled(values: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None = None) -> torch.Tensor:
    """`values * scale + offset`, with one scale for each run: [n, m], [n, k] and [n, k] to [n, m]."""
    n, runs = scale.shape
    grouped = values.float().view(n, runs, -1).mul_(scale.unsqueeze(-1))
    if offset is not None:
        grouped += offset.unsqueeze(-1)
    return grouped.view(n, -1)


# ---- 32 elements a block ----------------------------------------------------------------------


def _q4_0(b: torch.Tensor) -> torch.Tensor:
    return _scaled(unpack(b[:, 2:], 4, 16).view(torch.int8) - 8, half(b[:, :2]))


def _q4_1(b: torch.Tensor) -> torch.Tensor:
    return _scaled(unpack(b[:, 4:], 4, 16), half(b[:, :2]), half(b[:, 2:4]))


def fifth_bits(field: torch.Tensor) -> torch.Tensor:
    """Bit i of a little-endian word of 32 bits belongs to element i; shifted to bit 4."""
    return unpack(field, 1, 1) << 4


def _q5_0(b: torch.Tensor) -> torch.Tensor:
    q = unpack(b[:, 6:], 4, 16) | fifth_bits(b[:, 2:6])
    return _scaled(q.view(torch.int8) - 16, half(b[:, :2]))


def _q5_1(b: torch.Tensor) -> torch.Tensor:
    q = unpack(b[:, 8:], 4, 16) | fifth_bits(b[:, 4:8])
    return _scaled(q, half(b[:, :2]), half(b[:, 2:4]))


def _q8_0(b: torch.Tensor) -> torch.Tensor:
    return _scaled(b[:, 2:].contiguous().view(torch.int8), half(b[:, :2]))


NONLINEAR = torch.tensor(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), dtype=torch.float32
)  # IQ4's levels: closer together near zero
_E2M1_DOUBLED = torch.tensor((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), dtype=torch.float32)


def _looked_up(indices: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    return levels[indices.int()]


def _iq4_nl(b: torch.Tensor) -> torch.Tensor:
    return _scaled(_looked_up(unpack(b[:, 2:], 4, 16), NONLINEAR), half(b[:, :2]))


def _mxfp4(b: torch.Tensor) -> torch.Tensor:
    # the scale is a power of two, 2**(e - 127), and the levels are doubled
    scale = torch.exp2(b[:, :1].double() - 128).float()
    return _scaled(_looked_up(unpack(b[:, 1:], 4, 16), _E2M1_DOUBLED), scale)


# ---- 256 elements a block ---------------------------------------------------------------------


def _q2_k(b: torch.Tensor) -> torch.Tensor:
    scale = half(b[:, 80:82]) * (b[:, :16] & 15)
    offset = half(b[:, 82:84]) * (b[:, :16] >> 4)
    return _scaled(unpack(b[:, 16:80], 2, 32), scale, -offset)


def _q3_k(b: torch.Tensor) -> torch.Tensor:
    low, high = unpack(b[:, 96:104], 4, 8), unpack(b[:, 104:108], 2, 4)
    scale = half(b[:, 108:110]) * ((low | (high << 4)).view(torch.int8) - 32)
    absent = 1 - unpack(b[:, :32], 1, 32)  # 4 is taken off where the high bit is not set
    return _scaled(unpack(b[:, 32:96], 2, 32).view(torch.int8) - (absent << 2).view(torch.int8), scale)


def k_scales(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight offsets of 6 bits, [n, 8] each: bytes 4..16 of Q4_K and Q5_K."""
    first, second, third = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=1)
    offsets = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=1)
    return scales, offsets


def _k_factors(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same times their common factors; what is added to a value is the offset's negative."""
    scales, offsets = k_scales(b)
    return half(b[:, :2]) * scales, -(half(b[:, 2:4]) * offsets)


def _q4_k(b: torch.Tensor) -> torch.Tensor:
    return _scaled(unpack(b[:, 16:], 4, 32), *_k_factors(b))


def _q5_k(b: torch.Tensor) -> torch.Tensor:
    q = unpack(b[:, 48:], 4, 32) | (unpack(b[:, 16:48], 1, 32) << 4)
    return _scaled(q, *_k_factors(b))


def _q6_k(b: torch.Tensor) -> torch.Tensor:
    q = unpack(b[:, :128], 4, 64) | (unpack(b[:, 128:192], 2, 32) << 4)
    scale = half(b[:, 208:210]) * b[:, 192:208].contiguous().view(torch.int8)
    return _scaled(q.view(torch.int8) - 32, scale)


def _iq4_xs(b: torch.Tensor) -> torch.Tensor:
    low, high = unpack(b[:, 4:8], 4, 1), unpack(b[:, 2:4], 2, 1)
    scale = half(b[:, :2]) * ((low | (high << 4)).view(torch.int8) - 32)
    return _scaled(_looked_up(unpack(b[:, 8:], 4, 16), NONLINEAR), scale)


def _tq1_0(b: torch.Tensor) -> torch.Tensor:
    """Five ternary digits a byte, as a fraction of 3**5: multiplying brings the next digit above 256."""
    powers = torch.tensor((1, 3, 9, 27, 81), dtype=torch.uint8).view(1, -1, 1)
    parts = (b[:, None, :32] * powers, b[:, None, 32:48] * powers, b[:, None, 48:52] * powers[:, :4])
    digits = torch.cat([p.reshape(len(b), -1) for p in parts], dim=1)
    return _scaled(((digits.int() * 3) >> 8) - 1, half(b[:, 52:54]))


def _tq2_0(b: torch.Tensor) -> torch.Tensor:
    return _scaled(unpack(b[:, :64], 2, 32).view(torch.int8) - 1, half(b[:, 64:66]))


DECODERS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k,
    "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0,
}  # fmt: skip
"""Types decoded here: [n, block_bytes] bytes to [n, block_size] floats."""
