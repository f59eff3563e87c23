"""Rotary embedding and the write to the paged cache, by the native core.

Promises: the rotation happens in the query's and key's own memory, views of one projection included; one rounding.
What it has no code for goes to the reference.
Does not know: which level of instructions runs.
"""

from typing import Final

import torch

from octavo.ops import reference
from octavo.ops.native import DTYPES, core

FLOATS: Final = (torch.float32, torch.bfloat16)


def rotary(query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.rotary`; both are rotated in place."""
    fit = (
        query.dtype == key.dtype
        and query.dtype in FLOATS
        and cos_sin.dtype in FLOATS
        and query.stride(2) == key.stride(2) == 1
        and cos_sin.is_contiguous()
    )
    if not fit:
        return reference.rotary(query, key, cos_sin)
    core.rotary(
        query.data_ptr(), key.data_ptr(), cos_sin.data_ptr(), query.shape[0], query.shape[1], key.shape[1],
        cos_sin.shape[1], query.stride(0), query.stride(1), key.stride(0), key.stride(1),
        DTYPES[query.dtype], DTYPES[cos_sin.dtype],
    )  # fmt: skip
    return query, key


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `reference.write_kv`; a padding slot is skipped."""
    if not _fit(key, value, key_cache, value_cache, slot_mapping):
        return reference.write_kv(key, value, key_cache, value_cache, slot_mapping)
    core.write_kv(
        key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), slot_mapping.data_ptr(),
        key.shape[0], key.shape[1], key.shape[2], key_cache.shape[2],
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        key_cache.stride(0), key_cache.stride(1), value_cache.stride(0), value_cache.stride(1),
        DTYPES[key.dtype], DTYPES[key_cache.dtype],
    )  # fmt: skip
    return None


def _fit(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> bool:
    dim = key.shape[2]
    return (
        key.dtype == value.dtype
        and key.dtype in FLOATS
        and key_cache.dtype == value_cache.dtype
        and key_cache.dtype in FLOATS
        and key.stride(2) == value.stride(2) == 1
        and key_cache.stride()[2:] == value_cache.stride()[2:] == (dim, 1)
        and slot_mapping.dtype == torch.int64
        and slot_mapping.is_contiguous()
    )
