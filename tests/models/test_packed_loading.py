"""A second start takes packed weights from a file, and gives the same model; a file of no use is made anew."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.config.facts import DeviceFacts, read_model_facts
from octavo.distributed.context import ParallelContext
from octavo.distributed.group import SingleGroup
from octavo.models import fingerprint as fingerprint_module
from octavo.models import loader
from octavo.models.build import BuildSettings, build_context
from octavo.models.filling import model_state
from octavo.models.fingerprint import fingerprint
from octavo.models.loader import LoadedModel, WeightSource, load_model
from octavo.models.packed import PackedFolder
from octavo.models.weights import open_checkpoint
from octavo.ops.registry import OpRegistry
from tests.models.oracle import PagedRun
from tests.support.checkpoints import tiny_llama, tiny_qwen2
from tests.support.gguf_files import write_gguf

TOKENS = [5, 300, 17, 17, 411, 260, 99, 8, 402, 31]
ROOMY = DeviceFacts(kind="cpu", name="test", memory_total_bytes=1 << 34, memory_available_bytes=1 << 34, num_cores=1)
SHORT = DeviceFacts(kind="cpu", name="test", memory_total_bytes=1 << 34, memory_available_bytes=1000, num_cores=1)


@pytest.fixture(autouse=True)
def small_models_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loader, "_WORTH_KEEPING_BYTES", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path: Path) -> PackedFolder:
    return PackedFolder(tmp_path / "packed", 1 << 30)


def settings(**changes: Any) -> BuildSettings:
    fields = {"dtype": torch.float32, "device_facts": ROOMY, "max_model_len": 256, "block_size": 16}
    return BuildSettings(**{**fields, **changes})


class Start:
    """One load, with its lines, and the writing waited for."""

    def __init__(self, path: Path, folder: PackedFolder, **changes: Any) -> None:
        self.lines: list[str] = []
        source = WeightSource(packed=folder, num_threads=2)
        self.loaded: LoadedModel = load_model(
            read_model_facts(path), settings(**changes), source, progress=self.lines.append
        )
        self.wrote = self.loaded.writing is not None
        if self.loaded.writing is not None:
            self.loaded.writing.stop(60)

    @property
    def was_packed(self) -> bool:
        return self.loaded.source.startswith("packed weights in ")

    def logits(self) -> torch.Tensor:
        return PagedRun(self.loaded.model, 1, 64).step({0: TOKENS})[0]


def files(folder: PackedFolder) -> list[Path]:
    return sorted(folder.folder.iterdir())


# ---- the same model -----------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("linear", ["native", "reference"])
@pytest.mark.parametrize("device", [ROOMY, SHORT], ids=["read", "mapped"])
def test_a_second_start_gives_the_same_bits(
    folder: PackedFolder, tied: bool, dtype: torch.dtype, linear: str, device: DeviceFacts
) -> None:
    if linear not in [i.name for i in OpRegistry().implementations("linear")]:
        pytest.skip("built without the native core")
    path = tiny_llama(tie_word_embeddings=tied, attention_bias=True)
    changes = {"dtype": dtype, "forced_ops": {"linear": linear}, "device_facts": device}
    first, second = Start(path, folder, **changes), Start(path, folder, **changes)
    assert (first.was_packed, first.wrote) == (False, True) and first.loaded.source == "model.safetensors"
    assert (second.was_packed, second.wrote) == (True, False) and first.lines == second.lines == []
    assert torch.equal(first.logits(), second.logits())
    assert first.loaded.weight_bytes == second.loaded.weight_bytes
    assert first.loaded.specs == second.loaded.specs


def test_a_gguf_file_too_with_its_rotary_divisors(tmp_path: Path, folder: PackedFolder) -> None:
    import numpy as np

    path = write_gguf(tiny_qwen2(), tmp_path / "m.gguf", tensors={"rope_freqs.weight": np.full(8, 2, np.float32)})
    first, second = Start(path, folder), Start(path, folder)
    assert first.loaded.source == "m.gguf" and second.was_packed
    assert torch.equal(first.logits(), second.logits())


def test_another_length_uses_the_same_file(folder: PackedFolder) -> None:
    Start(tiny_llama(), folder)
    longer = Start(tiny_llama(), folder, max_model_len=512, block_size=32)
    assert longer.was_packed and longer.loaded.model.model.rotary.table.shape[0] == 512


def test_warnings_about_the_checkpoint_are_still_given(tmp_path: Path, folder: PackedFolder) -> None:
    from safetensors.torch import load_file, save_file

    path = tiny_llama(tmp_path / "m")
    weights = load_file(path / "model.safetensors")
    save_file({**weights, "something": torch.ones(1)}, path / "model.safetensors")
    first, second = Start(path, folder), Start(path, folder)
    assert second.was_packed and first.loaded.notes == second.loaded.notes != ()


def test_small_models_are_not_kept(folder: PackedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_WORTH_KEEPING_BYTES", 1 << 30)
    assert not Start(tiny_llama(), folder).wrote and not folder.folder.exists()


# ---- files of no use ----------------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_in_the_data(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)


def flip_in_the_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, empty, flip_in_the_data, flip_in_the_header])
def test_a_damaged_file_is_made_anew_with_one_note(folder: PackedFolder, damage: Callable[[Path], None]) -> None:
    first = Start(tiny_llama(), folder)
    damage(files(folder)[0])
    second, third = Start(tiny_llama(), folder), Start(tiny_llama(), folder)
    assert not second.was_packed and len(second.lines) == 1
    assert second.lines[0].startswith(f"warning: packed weights in {files(folder)[0]} are of no use and are made anew:")
    assert third.was_packed and third.lines == []
    assert torch.equal(first.logits(), second.logits()) and torch.equal(first.logits(), third.logits())


def test_a_file_whose_tensors_are_anothers_is_made_anew(folder: PackedFolder) -> None:
    """The right key over the wrong tensors: a mistake of ours, which must not end a start."""
    path = tiny_llama()
    first = Start(path, folder)
    state = model_state(first.loaded.model)
    key = fingerprint_of(path)
    name, tensor = next(iter(state.items()))
    for wrong in ({}, {**state, "more:weight": torch.ones(1)}, {**state, name: tensor[:1].clone()}):
        folder.store(key, wrong, lambda: False)
        again = Start(path, folder)
        assert not again.was_packed and len(again.lines) == 1
        assert torch.equal(first.logits(), again.logits())


def test_a_file_that_cannot_be_written_is_one_note(tmp_path: Path) -> None:
    (tmp_path / "packed").write_text("a file where the folder should be")
    start = Start(tiny_llama(), PackedFolder(tmp_path / "packed", 1 << 30))
    assert len(start.lines) <= 2 and "packed weights are not kept for the next start" in start.lines[-1]
    assert torch.isfinite(start.logits()).all()


def test_two_starts_at_once_leave_one_file(folder: PackedFolder) -> None:
    starts: list[Start] = []
    threads = [threading.Thread(target=lambda: starts.append(Start(tiny_llama(), folder))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(starts) == 3 and len(files(folder)) == 1
    assert Start(tiny_llama(), folder).was_packed


# ---- the key ------------------------------------------------------------------------------------


def fingerprint_of(path: Path, **changes: Any) -> str:
    facts = read_model_facts(path)
    ctx = build_context(facts, settings(**changes))
    return fingerprint(ctx, open_checkpoint(facts, loader._weight_map(facts, ()).gguf))


def test_a_moved_or_copied_checkpoint_has_the_same_key(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m")
    copied = Path(shutil.copytree(path, tmp_path / "n"))  # with its times
    assert fingerprint_of(path) == fingerprint_of(copied) == fingerprint_of(path, max_model_len=17)


def test_everything_that_decides_the_bytes_is_in_the_key(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m")
    group = SingleGroup(1, 2)
    keys = {
        "as it is": fingerprint_of(path),
        "dtype": fingerprint_of(path, dtype=torch.bfloat16),
        "operator": fingerprint_of(path, forced_ops={"linear": "reference"}),
        "rank": fingerprint_of(path, parallel=ParallelContext(tp=group, pp=group, dp=group, ep=group, cp=group)),
        "architecture": fingerprint_of(tiny_llama(tmp_path / "wide", hidden_size=128)),
        "a rotary base, which changes no weight but costs nothing": fingerprint_of(
            tiny_llama(tmp_path / "rope", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
        ),
    }
    weights = path / "model.safetensors"
    os.utime(weights, ns=(time.time_ns(), weights.stat().st_mtime_ns + 1))
    keys["touched"] = fingerprint_of(path)
    if "native" in [i.name for i in OpRegistry().implementations("linear")]:
        from octavo.ops import native

        best = native.core.level()
        for level in native.levels()[:-1]:
            native.use_level(level)
            keys[level] = fingerprint_of(path)
        native.use_level(best)
    assert len(set(keys.values())) == len(keys)


def test_the_code_that_packs_is_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or weights packed by yesterday's code would be read back by today's."""
    path = tiny_llama(tmp_path / "m")
    package = tmp_path / "package"
    for folder in ("quant", "server"):
        (package / folder).mkdir(parents=True)
        (package / folder / "a.py").write_text("x = 1")
    code = fingerprint_module._code
    monkeypatch.setattr(fingerprint_module, "_code", lambda _: code(package))
    first = fingerprint_of(path)
    (package / "server" / "a.py").write_text("x = 2")
    assert fingerprint_of(path) == first
    (package / "quant" / "a.py").write_text("x = 2")
    assert fingerprint_of(path) != first


def test_a_changed_checkpoint_is_packed_anew(tmp_path: Path, folder: PackedFolder) -> None:
    from safetensors.torch import load_file, save_file

    path = tiny_llama(tmp_path / "m")
    first = Start(path, folder)
    weights = load_file(path / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in weights.items()}, path / "model.safetensors")
    second = Start(path, folder)
    assert not second.was_packed and not torch.equal(first.logits(), second.logits())
