"""Gated activations by the native core.

Promises: one rounding, at the end. What it has no code for goes to the reference.
Does not know: which level of instructions runs.
"""

from collections.abc import Callable
from typing import Final

import torch

from octavo.ops import reference
from octavo.ops.native import DTYPES, core, rows_apart

SILU: Final = 0
GELU: Final = 1
GELU_TANH: Final = 2
FLOATS: Final = (torch.float32, torch.bfloat16)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """See `reference.silu_mul`; x [T, 2N], rows of any stride."""
    return _gated(x, SILU, reference.silu_mul)


def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    """See `reference.gelu_mul`; x [T, 2N], rows of any stride."""
    return _gated(x, GELU, reference.gelu_mul)


def gelu_tanh_mul(x: torch.Tensor) -> torch.Tensor:
    """See `reference.gelu_tanh_mul`; x [T, 2N], rows of any stride."""
    return _gated(x, GELU_TANH, reference.gelu_tanh_mul)


def _gated(x: torch.Tensor, gate: int, twin: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    if x.dim() != 2 or x.dtype not in FLOATS or x.stride(1) != 1:
        return twin(x)
    rows, width = x.shape[0], x.shape[1] // 2
    out = rows_apart(rows, width, x.dtype)
    core.gated(x.data_ptr(), out.data_ptr(), rows, width, x.stride(0), out.stride(0), gate, DTYPES[x.dtype])
    return out
