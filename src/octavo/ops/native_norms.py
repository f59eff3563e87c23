"""Norms by the native core.

Promises: one rounding, at the end; the residual stream is kept in float32; any row stride. What it has no code for goes
to the reference.
Does not know: which level of instructions runs.
"""

import torch

from octavo.ops import reference
from octavo.ops.native import DTYPES, core, rows_apart

FLOATS = (torch.float32, torch.bfloat16)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `reference.rms_norm`; x [T, N] or [T, H, N], with any strides but the last dimension's."""
    shape, strides = x.shape, x.stride()
    if x.dtype != weight.dtype or x.dtype not in FLOATS or x.dim() not in (2, 3) or strides[-1] != 1:
        return reference.rms_norm(x, weight, eps)
    out = torch.empty(shape, dtype=x.dtype)
    width = shape[-1]
    heads, head = (shape[1], strides[1]) if len(shape) == 3 else (1, 0)
    core.rms_norm(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), shape[0], heads, width, strides[0], head, heads * width, width,
        eps, DTYPES[x.dtype],
    )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.add_rms_norm`; x and residual [T, N]. The sum is float32, in `residual`'s place if that is."""
    if not _fit(x, residual, weight):
        return reference.add_rms_norm(x, residual, weight, eps)
    out = rows_apart(x.shape[0], x.shape[1], weight.dtype)
    in_place = residual.dtype == torch.float32 and residual.is_contiguous()
    total = residual if in_place else torch.empty(x.shape, dtype=torch.float32)
    core.add_rms_norm(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr(), x.shape[0], x.shape[1],
        x.stride(0), residual.stride(0), out.stride(0), eps, DTYPES[x.dtype], DTYPES[residual.dtype], DTYPES[weight.dtype],
    )  # fmt: skip
    return out, total


def _fit(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        x.dtype in FLOATS
        and residual.dtype in FLOATS
        and weight.dtype in FLOATS
        and x.dim() == 2
        and x.shape == residual.shape
        and x.stride(1) == 1
        and residual.stride(1) == 1
    )
