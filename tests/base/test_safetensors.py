"""Safetensors files: what is read equals what the library wrote, and damage is named (EXE-21, LOAD-01)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo.base.errors import LoadError
from octavo.base.safetensors import read_safetensors


def write(path: Path) -> Path:
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).view(2, 3),
        "b": torch.arange(5, dtype=torch.bfloat16),
        "c": torch.tensor(3, dtype=torch.int64),
        "d": torch.zeros(0, 4),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def raw(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_tensors_are_read_as_written(tmp_path: Path) -> None:
    file = read_safetensors(write(tmp_path / "m.safetensors"))
    found = {name: (t.dtype, t.shape) for name, t in file.tensors.items()}
    assert found == {"a": ("F32", (2, 3)), "b": ("BF16", (5,)), "c": ("I64", ()), "d": ("F32", (0, 4))}
    assert file.bytes_of(file.tensors["a"]).view(np.float32).tolist() == list(range(6))
    starts = [t.start for t in file.tensors.values()]
    assert starts == sorted(starts)


def test_a_file_cut_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.safetensors").read_bytes()
    path = tmp_path / "cut.safetensors"
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(LoadError, match=r"cut\.safetensors is cut short .*interrupted download"):
            read_safetensors(path)


def test_the_cut_tensor_is_named(tmp_path: Path) -> None:
    header = {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    with pytest.raises(LoadError, match="inside tensor 'w', which ends at byte"):
        read_safetensors(raw(tmp_path / "m.safetensors", header, bytes(12)))


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"w": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}}, "tensor 'w' has 16 bytes"),
        ({"w": {"dtype": "F32", "shape": [4], "data_offsets": [-8, 8]}}, "tensor 'w' has 16 bytes"),
        ({"w": {"dtype": "X9", "shape": [4], "data_offsets": [0, 16]}}, "type X9"),
        ({"w": {"dtype": "F32", "shape": [4]}}, "header cannot be understood"),
        ({"w": 3}, "header cannot be understood"),
        (b'{"w": ', "header cannot be understood"),
        (b"\xff" * 8, "not a safetensors file"),
        ({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}, "goes on for 4 bytes after its last tensor"),
        ({"w": {"dtype": "F32", "shape": [3], "data_offsets": [4, 16]}}, "'w' does not begin where"),
        (
            {n: {"dtype": "F32", "shape": [2], "data_offsets": [a, a + 8]} for n, a in (("v", 0), ("w", 4))},
            "'w' does not",
        ),
    ],
)
def test_damaged_headers_are_refused(tmp_path: Path, header: object, why: str) -> None:
    with pytest.raises(LoadError, match=why):
        read_safetensors(raw(tmp_path / "m.safetensors", header, bytes(16)))


@pytest.mark.parametrize("data", [b"\x80\x02}q\x00." + bytes(99), b"PK\x03\x04" + bytes(99)])
def test_other_formats_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(data)
    with pytest.raises(LoadError, match="is not a safetensors file"):
        read_safetensors(tmp_path / "m.safetensors")


def test_pages_given_back_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    values = torch.arange(1 << 16, dtype=torch.float32)
    save_file({"w": values}, path)
    file = read_safetensors(path)
    tensor = file.tensors["w"]
    assert file.bytes_of(tensor).view(np.float32)[-1] == values[-1]
    file.file.forget(tensor.start, tensor.size)
    assert np.array_equal(file.bytes_of(tensor).view(np.float32), values.numpy())
