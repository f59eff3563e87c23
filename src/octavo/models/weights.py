"""A checkpoint's tensors under Hugging Face's names, whatever file they lie in.

Promises: opening a checkpoint reads headers only, and finds every missing, damaged or cut file; tensors are then
read one at a time, from mapped files, and each one's memory is given back when the next is read.
Does not know: the model that they go to (see `models.loader`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch

from octavo.base.errors import ConfigError, LoadError
from octavo.base.gguf import GGUFTensor, read_gguf
from octavo.base.mapped import Bytes, MappedFile
from octavo.base.safetensors import SafeTensor, SafetensorsFile, read_safetensors
from octavo.config.facts import ModelFacts
from octavo.config.facts_hf import read_json
from octavo.models.build import GGUFNames
from octavo.quant.gguf_blocks import dequantize

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class _Rows(Protocol):
    """How one tensor's rows are read."""

    def values(self, first: int, count: int, dtype: torch.dtype | None) -> torch.Tensor: ...

    def blocks(self, first: int, count: int) -> torch.Tensor | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a checkpoint, not read yet: a `quant.api.Piece`. `start` and `size` are its bytes in `file`."""

    name: str  # Hugging Face's; the file's own where there is no such name
    stored_name: str
    known: bool  # False: the architecture has no name for it
    shape: tuple[int, ...]
    kind: str  # its type, as the file calls it
    file: MappedFile
    start: int
    size: int
    reader: _Rows

    def rows(self, first: int, count: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Values of these rows. Rows stored in `dtype` may come as a view of the file."""
        return self.reader.values(first, count, dtype)

    def raw(self, first: int, count: int) -> torch.Tensor | None:
        """Blocks of these rows as they are stored, [count, bytes of a row]; None for types without blocks."""
        return self.reader.blocks(first, count)

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """All values. A tensor stored in `dtype` may come as a view of the file; copy it before the next is read."""
        return self.rows(0, self.shape[0] if self.shape else 1, dtype).view(self.shape)

    def prefetch(self) -> None:
        """Let the system begin to read the bytes."""
        self.file.prefetch(self.start, self.size)

    def forget(self) -> None:
        """Give the memory of the file's pages back."""
        self.file.forget(self.start, self.size)


def open_checkpoint(facts: ModelFacts, names: GGUFNames, load_format: str = "auto") -> tuple[StoredTensor, ...]:
    """All tensors of a checkpoint, in the order of their bytes.

    Raises `LoadError` naming the file or tensor that is missing or damaged, and `ConfigError` when `load_format`
    is not the checkpoint's.
    """
    found = {"hf": "safetensors", "gguf": "gguf"}[facts.format]
    if load_format not in ("auto", found):
        raise ConfigError(
            f"load format {load_format!r} was asked for, but {facts.source} holds {found} weights; use auto"
        )
    return _gguf(facts, names) if found == "gguf" else _safetensors(Path(facts.source))


def iter_weights(
    facts: ModelFacts, names: GGUFNames, dtype: torch.dtype, load_format: str = "auto"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor by its Hugging Face name, one at a time; each is valid until the next is asked for."""
    for tensor in open_checkpoint(facts, names, load_format):
        yield tensor.name, tensor.read(dtype)
        tensor.forget()


# ---- safetensors ------------------------------------------------------------------------------


def _safetensors(folder: Path) -> tuple[StoredTensor, ...]:
    out: dict[str, StoredTensor] = {}
    for path in _weight_files(folder):
        file = read_safetensors(path)
        for tensor in file.tensors.values():
            if tensor.name in out:
                raise LoadError(
                    f"tensor {tensor.name!r} is in both {out[tensor.name].file.path} and {path}; remove one"
                )
            out[tensor.name] = _from_safetensors(file, tensor)
    if (folder / INDEX_NAME).exists() and not (folder / SINGLE_NAME).exists():
        _check_index(folder, out)
    return tuple(out.values())


def _from_safetensors(file: SafetensorsFile, tensor: SafeTensor) -> StoredTensor:
    return StoredTensor(
        name=tensor.name,
        stored_name=tensor.name,
        known=True,
        shape=tensor.shape,
        kind=tensor.dtype,
        file=file.file,
        start=tensor.start,
        size=tensor.size,
        reader=_SafeRows(file, tensor),
    )


@dataclass(frozen=True, slots=True)
class _SafeRows:
    """Rows of a safetensors tensor: plain numbers, one after the other."""

    file: SafetensorsFile
    tensor: SafeTensor

    def values(self, first: int, count: int, dtype: torch.dtype | None) -> torch.Tensor:
        kind = TORCH_DTYPES.get(self.tensor.dtype)
        if kind is None:
            raise LoadError(
                f"{self.file.file.path}: tensor {self.tensor.name!r} of type {self.tensor.dtype} cannot be read"
            )
        data = torch.from_numpy(self.file.bytes_of(self.tensor)).view(kind)
        if self.tensor.shape:
            data = data.view(self.tensor.shape)
        return data[first : first + count].to(dtype or kind)

    def blocks(self, first: int, count: int) -> None:
        return None


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE_NAME).exists():
        return [folder / SINGLE_NAME]
    if (folder / INDEX_NAME).exists():
        return _indexed_files(folder)
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise LoadError(f"{folder} holds no weights: {_no_weights(folder)}")
    if any("-of-" in file.name for file in found):
        raise LoadError(
            f"{folder / INDEX_NAME} is missing, although the weights come in several files such as {found[0].name} "
            f"(an interrupted download?); fetch the model again"
        )
    return found


def _no_weights(folder: Path) -> str:
    if pickled := sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*")):
        return f"{pickled[0].name} is a pickle, which is not read because it can run code; convert it to safetensors"
    return "there is no *.safetensors file (an interrupted download?); fetch the model again"


def _weight_map(folder: Path) -> Mapping[str, str]:
    names = read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(f, str) for f in names.values()):
        raise LoadError(
            f"{folder / INDEX_NAME} has no 'weight_map' of tensor names to files (an interrupted download?)"
        )
    return names


def _indexed_files(folder: Path) -> list[Path]:
    weight_map = _weight_map(folder)
    files = [folder / name for name in dict.fromkeys(weight_map.values())]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        lost = [name for name, file in weight_map.items() if file == missing[0]]
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise LoadError(
            f"{folder / missing[0]}{more} is missing: {INDEX_NAME} names it for {len(lost)} tensors such as {lost[0]!r} "
            f"(an interrupted download?); fetch the model again"
        )
    return files


def _check_index(folder: Path, found: Mapping[str, StoredTensor]) -> None:
    for name, file in _weight_map(folder).items():
        if name not in found or found[name].file.path.name != file:
            raise LoadError(
                f"{folder / file} does not hold tensor {name!r}, although {INDEX_NAME} says so (an interrupted download, "
                f"or files of different versions?); fetch the model again"
            )


# ---- GGUF -------------------------------------------------------------------------------------


def _gguf(facts: ModelFacts, names: GGUFNames) -> tuple[StoredTensor, ...]:
    file = read_gguf(facts.source)
    return tuple(_from_gguf(tensor, names, facts) for tensor in file.tensors.values())


def _from_gguf(tensor: GGUFTensor, names: GGUFNames, facts: ModelFacts) -> StoredTensor:
    name, heads = names.hf_name(tensor.name), names.interleaved_heads(tensor.name, facts)
    return StoredTensor(
        name=name or tensor.name,
        stored_name=tensor.name,
        known=name is not None,
        shape=tensor.shape,
        kind=tensor.type.name,
        file=tensor.file,
        start=tensor.start,
        size=tensor.size,
        reader=_GGUFRows(tensor, heads),
    )


@dataclass(frozen=True, slots=True)
class _GGUFRows:
    """Rows of a GGUF tensor, in Hugging Face's order. `heads` are those whose rotary pairs lie side by side."""

    tensor: GGUFTensor
    heads: int | None

    def values(self, first: int, count: int, dtype: torch.dtype | None) -> torch.Tensor:
        kind, shape = self.tensor.type, self.tensor.shape
        rest = shape[1:] if shape else ()
        return dequantize(self._bytes(first, count).reshape(-1), kind, (count, *rest), dtype=dtype or torch.float32)

    def blocks(self, first: int, count: int) -> torch.Tensor | None:
        return torch.from_numpy(self._bytes(first, count)) if self.tensor.type.block_size > 1 else None

    def _bytes(self, first: int, count: int) -> Bytes:
        """[count, bytes of a row]: a view of the file, or a copy when rows must change places."""
        rows = self.tensor.data.reshape(self.tensor.shape[0] if self.tensor.shape else 1, -1)
        if self.heads is None:
            return rows[first : first + count]
        places = take_pairs_apart(torch.arange(len(rows)), self.heads)
        moved: Bytes = rows[places[first : first + count].numpy()]
        return moved


def take_pairs_apart(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Each head's rows from pairs side by side (0, half, 1, half + 1, ..) to halves (0, 1, .., half, ..): [R, ..].

    llama.cpp's converter puts rows 0 and half of a head beside each other for its own form of the rotation.
    """
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
