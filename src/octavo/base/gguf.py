"""GGUF files: metadata and where each tensor lies (numpy only).

Promises: a file that opens is whole: every tensor lies inside it; tensor bytes are mapped, never read ahead.
Does not know: what the metadata mean (`config.facts_gguf`) or how blocks are decoded (`quant.gguf_blocks`).

Source: the format's own description, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
(versions 2 and 3, little-endian).
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np

from octavo.base.errors import LoadError
from octavo.base.mapped import Bytes, MappedFile


@dataclass(frozen=True, slots=True)
class GGMLType:
    """A storage type: `block_bytes` bytes hold `block_size` elements."""

    name: str
    block_size: int
    block_bytes: int


GGML_TYPES: Final[Mapping[int, GGMLType]] = {
    number: GGMLType(name, size, size_bytes)
    for number, name, size, size_bytes in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 40), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8), (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56), (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """One tensor: `shape` is row-major as numpy and torch write it; `start` and `size` are bytes in `file`."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    file: MappedFile
    start: int
    size: int

    @property
    def data(self) -> Bytes:
        """Its bytes, mapped."""
        return self.file.view(self.start, self.size)

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFile:
    """Metadata and tensors of a file, or of all files of a split one, in file order."""

    path: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


def is_gguf(path: str | Path) -> bool:
    """True for a file that starts with GGUF's magic number."""
    path = Path(path)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def read_gguf(path: str | Path, *, with_tensors: bool = True) -> GGUFFile:
    """Open a GGUF file, or the first file of a split one with its siblings.

    Raises `LoadError` for files that are not GGUF, of another version or byte order, or cut short.
    `with_tensors=False` reads the metadata only, without the check that tensors are whole.
    """
    path = Path(path)
    metadata, tensors = _read_one(path, with_tensors)
    num_files = metadata.get("split.count", 1)
    if with_tensors and num_files > 1:
        for sibling in _siblings(path, num_files):
            tensors.update(_read_one(sibling, True)[1])
    return GGUFFile(path=str(path), metadata=metadata, tensors=tensors)


def _siblings(path: Path, num_files: int) -> list[Path]:
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if match is None or int(match[2]) != 1 or int(match[3]) != num_files:
        raise LoadError(
            f"{path} is one of {num_files} files of a split GGUF; give the first one, named ...-00001-of-{num_files:05d}.gguf"
        )
    siblings = [path.with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf") for i in range(2, num_files + 1)]
    for sibling in siblings:
        if not sibling.exists():
            raise LoadError(
                f"{sibling} is missing: {path.name} is one of {num_files} files and all are needed (an interrupted "
                f"download?); fetch it again"
            )
    return siblings


def _read_one(path: Path, with_tensors: bool) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    file = MappedFile(path)
    cursor = _Cursor(file)
    num_tensors, num_keys = cursor.header()
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("<I"))
    tensors = cursor.tensors(num_tensors, int(metadata.get("general.alignment", 32))) if with_tensors else {}
    return metadata, tensors


_SCALARS: Final[Mapping[int, str]] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 8


class _Cursor:
    """Reads one mapped file from front to back.

    Owns: its position.
    """

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self._data = file.data
        self._path = file.path
        self._at = 0

    def header(self) -> tuple[int, int]:
        """Number of tensors and of metadata keys."""
        if self._data[:4] != b"GGUF":
            raise LoadError(f"{self._path} is not a GGUF file: it does not start with 'GGUF'")
        self._at = 4
        version = self.number("<I")
        if version not in (2, 3):
            big = version in (2 << 24, 3 << 24)
            what = "is big-endian" if big else f"has GGUF version {version}"
            raise LoadError(f"{self._path} {what}; only little-endian versions 2 and 3 can be read")
        return self.number("<Q"), self.number("<Q")

    def number(self, form: str) -> Any:
        """One number in `struct` form."""
        end = self._advance(struct.calcsize(form))
        return struct.unpack_from(form, self._data, end - struct.calcsize(form))[0]

    def string(self) -> str:
        """One length-prefixed string; bytes that are not UTF-8 become U+FFFD."""
        size = self.number("<Q")
        end = self._advance(size)
        return self._data[end - size : end].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """One metadata value; arrays of numbers become numpy arrays, other arrays become lists."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise LoadError(f"{self._path} is damaged: its metadata hold a value of unknown type {kind}")
        item, count = self.number("<I"), self.number("<Q")
        if item in _SCALARS:
            dtype = np.dtype(_SCALARS[item])
            end = self._advance(count * dtype.itemsize)
            return np.frombuffer(self._data, dtype, count, end - count * dtype.itemsize).copy()
        self._room_for(count)  # a damaged count must not become a list of that length
        return self._strings(count) if item == _STRING else [self.value(item) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        # vocabularies have 100,000s of entries: one tight loop without a call per field
        data, at, size, unpack = self._data, self._at, len(self._data), struct.Struct("<Q").unpack_from
        out: list[str] = []
        for _ in range(count):
            if at + 8 > size:
                self._cut_short()
            (length,) = unpack(data, at)
            at += 8 + length
            if at > size:
                self._cut_short()
            out.append(data[at - length : at].decode("utf-8", errors="replace"))
        self._at = at
        return out

    def tensors(self, count: int, alignment: int) -> dict[str, GGUFTensor]:
        """The tensor index, with every tensor's bytes checked to lie inside the file."""
        found: list[tuple[str, tuple[int, ...], GGMLType, int]] = []
        self._room_for(count)
        for _ in range(count):
            name = self.string()
            num_dims = self.number("<I")
            if num_dims > _MAX_DIMS:
                raise LoadError(f"{self._path} is damaged: tensor {name!r} has {num_dims} dimensions")
            shape = tuple(self.number("<Q") for _ in range(num_dims))[::-1]
            number = self.number("<I")
            if number not in GGML_TYPES:
                raise LoadError(f"{self._path}: tensor {name!r} has type {number}, which this version does not know")
            found.append((name, shape, GGML_TYPES[number], self.number("<Q")))
        if alignment < 1:
            raise LoadError(f"{self._path} is damaged: general.alignment is {alignment}")
        base = -(-self._at // alignment) * alignment
        return {name: self._tensor(name, shape, kind, base + offset) for name, shape, kind, offset in found}

    def _tensor(self, name: str, shape: tuple[int, ...], kind: GGMLType, start: int) -> GGUFTensor:
        row = shape[-1] if shape else 1
        if row % kind.block_size:
            raise LoadError(
                f"{self._path} is damaged: rows of tensor {name!r} have {row} elements, not a multiple of "
                f"{kind.name}'s {kind.block_size}"
            )
        end = start + prod(shape) // kind.block_size * kind.block_bytes
        if end > len(self._file):
            raise LoadError(
                f"{self._path} is cut short: tensor {name!r} ends at byte {end}, but the file has {len(self._file)} bytes "
                f"(an interrupted download?); fetch it again"
            )
        return GGUFTensor(name=name, shape=shape, type=kind, file=self._file, start=start, size=end - start)

    def _advance(self, size: int) -> int:
        self._room_for(size)
        self._at += size
        return self._at

    def _room_for(self, size: int) -> None:
        if self._at + size > len(self._data):
            self._cut_short()

    def _cut_short(self) -> None:
        raise LoadError(
            f"{self._path} is cut short inside its header, at byte {len(self._data)} (an interrupted download?); "
            f"fetch it again"
        )
