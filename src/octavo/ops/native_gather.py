"""Rows of a table by index, by the native core.

Promises: any element type. What it has no code for goes to the reference.
Does not know: what a row is.
"""

import torch

from octavo.ops import reference
from octavo.ops.native import core


def gather_rows(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """See `reference.gather_rows`."""
    if not (table.is_contiguous() and index.is_contiguous() and index.dtype == torch.int64):
        return reference.gather_rows(table, index)
    num_rows, width = table.shape
    out = torch.empty((index.shape[0], width), dtype=table.dtype)
    core.gather_rows(
        table.data_ptr(), index.data_ptr(), out.data_ptr(), index.shape[0], num_rows, width * table.element_size()
    )
    return out
