"""GGUF files: what is read equals what the `gguf` package wrote, and damage is named (EXE-21, LOAD-01)."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.base.errors import LoadError
from octavo.base.gguf import GGML_TYPES, is_gguf, read_gguf
from tests.support.checkpoints import smollm2_gguf


def write(path: Path, *, alignment: int | None = None, split: tuple[int, int] | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    if split:
        writer.add_uint16("split.no", split[0])
        writer.add_uint16("split.count", split[1])
    prefix = f"t{split[0]}." if split else ""
    writer.add_uint32("a.number", 7)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "é🧑")
    writer.add_array("a.texts", ["x", "", "é"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_tensor(prefix + "matrix", np.arange(15, dtype=np.float32).reshape(3, 5))
    writer.add_tensor(prefix + "half", np.arange(7, dtype=np.float16))
    quantized = gguf.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor(prefix + "blocks", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [None, 64])
def test_metadata_and_tensors_are_read_as_written(tmp_path: Path, alignment: int | None) -> None:
    file = read_gguf(write(tmp_path / "m.gguf", alignment=alignment))
    assert file.metadata["general.architecture"] == "llama"
    assert (file.metadata["a.number"], file.metadata["a.float"], file.metadata["a.flag"]) == (7, 0.5, True)
    assert file.metadata["a.text"] == "é🧑"
    assert file.metadata["a.texts"] == ["x", "", "é"]
    assert file.metadata["a.numbers"].tolist() == [1, -2, 3]
    matrix = file.tensors["matrix"]
    assert (matrix.shape, matrix.type.name, matrix.num_elements) == ((3, 5), "F32", 15)
    assert matrix.data.view(np.float32).tolist() == list(range(15))
    assert file.tensors["half"].data.view(np.float16).tolist() == list(range(7))
    assert (file.tensors["blocks"].shape, file.tensors["blocks"].type.name) == ((2, 64), "Q8_0")
    assert file.tensors["blocks"].size == 4 * 34


def test_block_sizes_are_the_format_s_own() -> None:
    for number, kind in GGML_TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert (kind.name, kind.block_size, kind.block_bytes) == (theirs.name, *gguf.GGML_QUANT_SIZES[theirs])


def test_a_file_cut_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(4, len(whole) - 300, 11), *range(len(whole) - 300, len(whole) - 31)]:
        path.write_bytes(whole[:size])
        with pytest.raises(LoadError, match=r"cut\.gguf is cut short.*interrupted download"):
            read_gguf(path)


def test_a_cut_tensor_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(LoadError, match=r"tensor 'blocks' ends at byte \d+, but the file has \d+ bytes"):
        read_gguf(path)


@pytest.mark.parametrize("seed", range(200))
def test_damaged_headers_never_crash_or_hang(tmp_path: Path, seed: int) -> None:
    data = bytearray(write(tmp_path / "m.gguf").read_bytes())
    rng = np.random.default_rng(seed)
    for at in rng.integers(4, 500, 3):
        data[at] = rng.integers(256)
    (tmp_path / "d.gguf").write_bytes(data)
    try:
        read_gguf(tmp_path / "d.gguf")
    except LoadError as error:
        assert "d.gguf" in str(error)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"),
        (b"GGML" + bytes(60), "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    ],
)
def test_what_is_not_gguf_is_refused(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(LoadError, match=why):
        read_gguf(path)


def test_a_split_file_is_read_as_one(tmp_path: Path) -> None:
    for i in range(2):
        write(tmp_path / f"m-0000{i + 1}-of-00002.gguf", split=(i, 2))
    file = read_gguf(tmp_path / "m-00001-of-00002.gguf")
    assert set(file.tensors) == {f"t{i}.{name}" for i in range(2) for name in ("matrix", "half", "blocks")}


def test_a_split_file_without_its_siblings_is_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "m-00001-of-00002.gguf", split=(0, 2))
    with pytest.raises(LoadError, match=r"m-00002-of-00002\.gguf is missing.*interrupted download"):
        read_gguf(first)
    second = write(tmp_path / "m-00002-of-00002.gguf", split=(1, 2))
    with pytest.raises(LoadError, match=r"give the first one, named \.\.\.-00001-of-00002\.gguf"):
        read_gguf(second)


def test_files_are_told_apart_by_their_magic_number(tmp_path: Path) -> None:
    assert is_gguf(write(tmp_path / "any.name"))
    (tmp_path / "other").write_bytes(b"{}")
    assert not is_gguf(tmp_path / "other")
    assert not is_gguf(tmp_path)


@pytest.mark.slow
def test_the_real_file_reads_as_the_gguf_package_reads_it() -> None:
    path = smollm2_gguf()
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            value = ours.metadata[name]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), name
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].shape == tuple(tensor.shape.tolist()[::-1])
        assert ours.tensors[tensor.name].start == tensor.data_offset
