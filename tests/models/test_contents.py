"""The same weights have the same digest, wherever they lie (TIR-2)."""

import os
import shutil

import pytest

from octavo.base.errors import LoadError
from octavo.models import contents as module
from octavo.models.contents import contents, weight_files


def ignored(line):
    raise AssertionError(line)


def digest(source, kept=None, threads=2):
    return contents(source, kept=kept, num_threads=threads, say=ignored)


def folder(path, **files):
    path.mkdir(parents=True)
    for name, data in files.items():
        (path / f"{name}.safetensors").write_bytes(data)
    (path / "config.json").write_text("{}")
    return path


def test_a_copy_is_the_same_and_a_changed_bit_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SECTION_BYTES", 1000)
    monkeypatch.setattr(module, "PIECE_BYTES", 300)
    data = os.urandom(4321)
    one = folder(tmp_path / "one", a=data, b=b"more")
    two = shutil.copytree(one, tmp_path / "elsewhere" / "two")
    for path in two.iterdir():
        os.utime(path, (1, 1))
    (two / "README.md").write_text("of no account")
    want = digest(one)
    assert digest(two, threads=1) == want and len(want) == 64
    for at in (0, 999, 1000, 4320):
        changed = bytearray(data)
        changed[at] ^= 1
        (two / "a.safetensors").write_bytes(changed)
        assert digest(two) != want
    (two / "a.safetensors").write_bytes(data[:-1])
    assert digest(two) != want


def test_files_are_read_once_as_long_as_they_are_not_touched(tmp_path, monkeypatch):
    model, kept = folder(tmp_path / "model", a=b"12345", b=b"6789"), tmp_path / "cache"
    want, read = digest(model, kept), []
    monkeypatch.setattr(module, "_digest", lambda path, size, threads: read.append(path.name) or "0" * 64)
    assert digest(model, kept) == want and read == []
    os.utime(model / "b.safetensors", ns=(1, 1))
    assert digest(model, kept) != want and read == ["b.safetensors"]
    assert sorted(path.suffix for path in kept.iterdir()) == [".sums"]


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"a.safetensors": 5}', '{"a.safetensors": [5, 1]}'])
def test_what_was_kept_badly_is_computed_again(tmp_path, damage):
    model, kept = folder(tmp_path / "model", a=b"12345"), tmp_path / "cache"
    want = digest(model, kept)
    (book,) = kept.iterdir()
    book.write_text(damage)
    assert digest(model, kept) == want and digest(model, kept) == want


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path):
    model = folder(tmp_path / "model", a=b"12345")
    (tmp_path / "file").write_text("in the way")
    assert digest(model, tmp_path / "file" / "cache") == digest(model)


def test_a_gguf_file_comes_with_the_rest_of_its_split(tmp_path):
    names = ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf", "y-00001-of-00002.gguf", "z.gguf"]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    assert [p.name for p in weight_files(tmp_path / names[0])] == names[:2]
    assert [p.name for p in weight_files(tmp_path / "z.gguf")] == ["z.gguf"]
    moved = shutil.copy(tmp_path / "z.gguf", tmp_path / "w.gguf")
    assert digest(tmp_path / "z.gguf") == digest(tmp_path / os.path.basename(moved))


def test_what_took_long_is_said_and_what_cannot_be_read_is_an_error(tmp_path):
    said, times = [], iter([0.0, 5.0])
    model = folder(tmp_path / "model", a=b"12345")
    contents(model, kept=None, num_threads=1, say=said.append, clock=lambda: next(times))
    assert said == [
        "weights: a checksum of 0.00 GiB, by which KV is known, took 5.0 s and is not kept (--weight-cache off)"
    ]
    with pytest.raises(LoadError, match=r"gone\.gguf cannot be read: No such file"):
        digest(tmp_path / "gone.gguf")
