"""Safetensors files: where each tensor lies (numpy only).

Promises: a file that opens is whole: every tensor lies inside it and has the size that its shape says; bytes are
mapped, never read ahead.
Does not know: folders, indexes of shards, or models.

Source: https://github.com/huggingface/safetensors#format: eight bytes give the length of a JSON header, whose
offsets count from its end.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from octavo.base.errors import LoadError
from octavo.base.mapped import Bytes, MappedFile

DTYPE_BITS: Final[Mapping[str, int]] = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "C64": 64,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip
_MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True, kw_only=True)
class SafeTensor:
    """One tensor; `dtype` is the format's word (F32, BF16, ...) and `start`, `size` are bytes in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """An open file and its tensors, in the order of their bytes."""

    file: MappedFile
    tensors: Mapping[str, SafeTensor]

    def bytes_of(self, tensor: SafeTensor) -> Bytes:
        """A tensor's bytes, mapped."""
        return self.file.view(tensor.start, tensor.size)


def read_safetensors(path: str | Path) -> SafetensorsFile:
    """Open a file. Raises `LoadError` when it is missing, damaged or cut short."""
    file = MappedFile(Path(path))
    if len(file) < 8:
        raise _cut_short(file, "its header")
    header_bytes = int.from_bytes(file.data[:8], "little")
    if header_bytes > _MAX_HEADER_BYTES or file.data[8:9] not in (b"{", b""):
        raise LoadError(f"{path} is not a safetensors file: it does not start with a header")
    base = 8 + header_bytes
    if base > len(file):
        raise _cut_short(file, "its header")
    try:
        header = json.loads(file.data[8:base])
        found = [_entry(name, fields, base) for name, fields in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError):
        raise LoadError(f"{path} is damaged: its header cannot be understood (an interrupted download?)") from None
    for tensor in found:
        if tensor.dtype not in DTYPE_BITS:
            raise LoadError(f"{path}: tensor {tensor.name!r} has type {tensor.dtype}, which this version does not know")
        if tensor.size * 8 != prod(tensor.shape) * DTYPE_BITS[tensor.dtype] or tensor.start < base:
            raise LoadError(
                f"{path} is damaged: tensor {tensor.name!r} has {tensor.size} bytes, which is not its shape's size"
            )
        if tensor.start + tensor.size > len(file):
            raise _cut_short(file, f"tensor {tensor.name!r}, which ends at byte {tensor.start + tensor.size}")
    in_order = sorted(found, key=lambda t: (t.start, t.size))
    at = base
    for tensor in in_order:
        if tensor.start != at:
            raise LoadError(f"{path} is damaged: tensor {tensor.name!r} does not begin where the one before it ends")
        at += tensor.size
    if at != len(file):
        raise LoadError(f"{path} is damaged: it goes on for {len(file) - at} bytes after its last tensor")
    return SafetensorsFile(file, {t.name: t for t in in_order})


def _entry(name: str, fields: Mapping[str, Any], base: int) -> SafeTensor:
    start, end = fields["data_offsets"]
    shape = tuple(int(n) for n in fields["shape"])
    return SafeTensor(name=name, dtype=str(fields["dtype"]), shape=shape, start=base + start, size=end - start)


def _cut_short(file: MappedFile, where: str) -> LoadError:
    return LoadError(
        f"{file.path} is cut short at byte {len(file)}, inside {where} (an interrupted download?); fetch it again"
    )
