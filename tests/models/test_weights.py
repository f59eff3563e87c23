"""Readers give every tensor by its Hugging Face name, one at a time, from any format (EXE-21)."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from octavo.base.errors import ConfigError
from octavo.config.facts import read_model_facts
from octavo.models.registry import resolve
from octavo.models.weights import iter_weights, take_pairs_apart
from tests.support.checkpoints import smollm2_f32, smollm2_gguf, tiny_llama, tiny_qwen2, tiny_qwen3, tiny_sharded
from tests.support.gguf_files import write_gguf


def tensors_of(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    facts = read_model_facts(path)
    names = resolve(facts.architecture).weight_map(facts).gguf
    return {name: tensor.clone() for name, tensor in iter_weights(facts, names, dtype)}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_one_file() -> None:
    folder = tiny_llama()
    same(tensors_of(folder), load_file(folder / "model.safetensors"))


def test_shards_with_an_index() -> None:
    folder = tiny_sharded()
    parts = [load_file(file) for file in folder.glob("*.safetensors")]
    assert len(parts) == 2
    same(tensors_of(folder), parts[0] | parts[1])


def test_a_single_file_of_another_name(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    same(tensors_of(folder), load_file(folder / "weights.safetensors"))


@pytest.mark.parametrize("maker", [tiny_llama, tiny_qwen2, tiny_qwen3])
def test_gguf_gives_the_folder_s_own_tensors(tmp_path: Path, maker) -> None:
    """llama.cpp's order of q and k rows is undone for Llama, and only there."""
    folder = maker()
    same(tensors_of(write_gguf(folder, tmp_path / "m.gguf")), load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q5_1", "Q4_0"])
def test_quantized_gguf_gives_what_the_gguf_package_decodes(tmp_path: Path, quant: str) -> None:
    import gguf

    folder = tiny_llama()
    found = tensors_of(write_gguf(folder, tmp_path / "m.gguf", quant=quant))
    kind = gguf.GGMLQuantizationType[quant]
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.dim() == 2:  # rows are quantized one by one, so their order does not matter
            decoded = gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind)
            assert torch.equal(found[name], torch.from_numpy(decoded).view(tensor.shape)), name
        else:
            assert torch.equal(found[name], tensor), name


def test_values_come_in_the_type_that_is_asked_for(tmp_path: Path) -> None:
    folder = tiny_llama()
    stored = load_file(folder / "model.safetensors")
    for path in (folder, write_gguf(folder, tmp_path / "m.gguf")):
        same(tensors_of(path, torch.bfloat16), {name: t.bfloat16() for name, t in stored.items()})


def test_split_gguf_files_are_one_checkpoint(tmp_path: Path) -> None:
    """The second file holds a tensor that the first lacks."""
    import numpy as np

    folder = tiny_llama()
    first = {"split.no": 0, "split.count": 2}
    write_gguf(folder, tmp_path / "m-00001-of-00002.gguf", metadata=first)
    extra = {"rope_freqs.weight": np.ones(8, np.float32)}
    other = tiny_llama(tmp_path / "other")
    (other / "model.safetensors").unlink()
    from safetensors.torch import save_file

    save_file({}, other / "model.safetensors")
    write_gguf(other, tmp_path / "m-00002-of-00002.gguf", metadata={"split.no": 1, "split.count": 2}, tensors=extra)
    found = tensors_of(tmp_path / "m-00001-of-00002.gguf")
    assert found.keys() - load_file(folder / "model.safetensors").keys() == {"model.rotary.frequency_divisors"}


def test_pairs_of_rows_are_taken_apart() -> None:
    rows = torch.tensor([0, 2, 1, 3, 10, 12, 11, 13])
    assert take_pairs_apart(rows, 2).tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


@pytest.mark.parametrize(("load_format", "what"), [("gguf", "safetensors weights"), ("safetensors", "gguf weights")])
def test_a_load_format_that_contradicts_the_files_is_refused(tmp_path: Path, load_format: str, what: str) -> None:
    path = tiny_llama() if load_format == "gguf" else write_gguf(tiny_llama(), tmp_path / "m.gguf")
    facts = read_model_facts(path)
    names = resolve(facts.architecture).weight_map(facts).gguf
    with pytest.raises(ConfigError, match=rf"load format '{load_format}' was asked for, but .* holds {what}"):
        next(iter_weights(facts, names, torch.float32, load_format))


@pytest.mark.slow
def test_the_real_gguf_file_gives_what_the_gguf_package_decodes() -> None:
    """The float32 folder was made without our reader, so this checks decoding, names and the order of rows."""
    facts = read_model_facts(smollm2_gguf())
    names = resolve(facts.architecture).weight_map(facts).gguf
    expected = load_file(smollm2_f32() / "model.safetensors")
    seen = set()
    for name, tensor in iter_weights(facts, names, torch.float32):
        assert torch.equal(tensor, expected[name]), name
        seen.add(name)
    assert seen == expected.keys()


def test_files_are_left_as_they_were(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_llama(), folder)
    before = (folder / "model.safetensors").read_bytes()
    facts = read_model_facts(folder)
    for _, tensor in iter_weights(facts, resolve(facts.architecture).weight_map(facts).gguf, torch.float32):
        tensor.zero_()  # a view of the file must be a private one
    assert (folder / "model.safetensors").read_bytes() == before
