"""A loaded model is complete and right, or loading says in one sentence what is wrong (EXE-21, LOAD-01, REQ-18)."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.base.errors import ConfigError, LoadError
from octavo.base.kvspec import FullAttentionSpec, SlidingWindowSpec
from octavo.config.facts import read_model_facts
from octavo.models.build import BuildSettings
from octavo.models.loader import LoadedModel, WeightSource, build_meta, load_model
from tests.models.oracle import CPU_FACTS, PagedRun, hf_logits
from tests.support.checkpoints import (
    tiny_llama,
    tiny_mistral,
    tiny_qwen2,
    tiny_qwen3,
    tiny_sharded,
    tiny_swa,
)
from tests.support.gguf_files import write_gguf

TOKENS = [5, 300, 17, 17, 411, 260, 99, 8, 402, 31]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def settings(**changes: Any) -> BuildSettings:
    fields = {"dtype": torch.float32, "device_facts": CPU_FACTS, "max_model_len": 256, "block_size": 16}
    return BuildSettings(**{**fields, **changes})


def load(path: Path, source: WeightSource | None = None, progress: Any = None, **changes: Any) -> LoadedModel:
    return load_model(read_model_facts(path), settings(**changes), source, progress=progress or (lambda _: None))


def logits(loaded: LoadedModel) -> torch.Tensor:
    return PagedRun(loaded.model, 1, 64).step({0: TOKENS})[0]


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    return hf_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(), TOKENS)


# ---- what is right ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "maker",
    [tiny_llama, tiny_sharded, tiny_mistral, tiny_qwen2, tiny_qwen3, tiny_swa, lambda: tiny_swa(mixed=True, window=4)],
    ids=["llama", "sharded", "mistral", "qwen2", "qwen3", "swa", "swa mixed"],
)
def test_a_folder_gives_the_reference_s_logits(maker: Callable[[], Path]) -> None:
    folder = maker()
    torch.testing.assert_close(logits(load(folder)), reference(folder), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("maker", [tiny_llama, tiny_qwen2, tiny_qwen3])
def test_gguf_gives_the_same_logits_as_its_folder(tmp_path: Path, maker: Callable[[], Path]) -> None:
    folder = maker()
    loaded = load(write_gguf(folder, tmp_path / "m.gguf"))
    assert torch.equal(logits(loaded), logits(load(folder)))
    assert loaded.notes == ()


def test_gguf_rotary_divisors_are_used(tmp_path: Path) -> None:
    folder = tiny_llama()
    plain = write_gguf(folder, tmp_path / "a.gguf")
    ones = write_gguf(folder, tmp_path / "b.gguf", tensors={"rope_freqs.weight": np.ones(8, np.float32)})
    twos = write_gguf(folder, tmp_path / "c.gguf", tensors={"rope_freqs.weight": np.full(8, 2, np.float32)})
    linear = tiny_llama(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    assert torch.equal(logits(load(ones)), logits(load(plain)))
    torch.testing.assert_close(logits(load(twos)), logits(load(linear)), rtol=1e-5, atol=1e-5)
    assert load(twos).notes == ()


def test_weights_are_converted_to_the_type_that_is_asked_for() -> None:
    folder = tiny_llama()
    loaded = load(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.model.parameters()} <= {torch.bfloat16}
    full = load(folder)
    tables = sum(b.numel() * b.element_size() for b in full.model.buffers())  # of angles: float32 for any model
    assert (loaded.weight_bytes - tables) * 2 == full.weight_bytes - tables
    torch.testing.assert_close(logits(loaded).float(), reference(folder), rtol=0.2, atol=0.3)


def test_the_layers_own_specs_are_told() -> None:
    loaded = load(tiny_swa(mixed=True))
    common = {"block_size": 16, "num_kv_heads": 2, "head_dim": 32, "dtype": "float32"}
    assert loaded.specs == (SlidingWindowSpec(window=64, **common), FullAttentionSpec(**common))
    assert loaded.backend.name
    assert loaded.seconds > 0


def test_meta_says_the_same_without_weights(tmp_path: Path) -> None:
    """REQ-18: only config.json is there."""
    folder = tiny_swa(mixed=True)
    shutil.copy(folder / "config.json", tmp_path)
    facts = read_model_facts(tmp_path)
    meta = build_meta(facts, settings())
    loaded = load(folder)
    assert (meta.specs, meta.weight_bytes) == (loaded.specs, loaded.weight_bytes)


def test_dummy_weights_are_seeded_finite_and_need_no_files(tmp_path: Path) -> None:
    shutil.copy(tiny_llama() / "config.json", tmp_path)
    one, same, other = (logits(load(tmp_path, WeightSource(load_format="dummy", seed=seed))) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.isfinite(one).all()


def test_progress_and_warnings_are_lines(tmp_path: Path) -> None:
    lines: list[str] = []
    loaded = load(with_tensors(tmp_path, extra=torch.ones(2)), progress=lines.append)
    assert lines == [f"warning: {loaded.notes[0]}"]


# ---- what is wrong (LOAD-01) --------------------------------------------------------------------


def with_tensors(tmp_path: Path, *, drop: str | None = None, **changes: torch.Tensor) -> Path:
    """tiny-llama with one tensor dropped, or tensors replaced or added (dots written as __)."""
    folder = tiny_llama(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(drop or "", None)
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def refused(folder: Path, pattern: str, error: type[Exception] = LoadError) -> None:
    with pytest.raises(error, match=pattern) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("how", ["delete", "rename"])
def test_a_shard_that_is_missing_is_named_load_01(tmp_path: Path, how: str) -> None:
    folder = tiny_sharded(tmp_path / "m")
    shard = folder / "model-00002-of-00002.safetensors"
    if how == "delete":
        shard.unlink()
    else:
        shard.rename(folder / "model-00002.safetensors")
    refused(folder, r"model-00002-of-00002\.safetensors is missing: .* \d+ tensors such as .*interrupted download")


def test_an_empty_folder_and_one_without_weights_are_named_load_01(tmp_path: Path) -> None:
    refused(tmp_path, "neither config.json nor a GGUF file")
    shutil.copy(tiny_llama() / "config.json", tmp_path)
    refused(tmp_path, r"holds no weights: there is no \*\.safetensors file \(an interrupted download\?\)")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused(tmp_path, r"pytorch_model\.bin is a pickle, which is not read")


def test_a_missing_index_is_named_load_01(tmp_path: Path) -> None:
    folder = tiny_sharded(tmp_path / "m")
    (folder / "model.safetensors.index.json").unlink()
    refused(folder, r"model\.safetensors\.index\.json is missing, although .* model-00001-of-00002\.safetensors")


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_is_named_load_01(tmp_path: Path, text: str) -> None:
    folder = tiny_sharded(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder, r"model\.safetensors\.index\.json (is not valid JSON|has no 'weight_map').*interrupted download")


def test_extra_tensors_are_left_out_with_a_warning_load_01(tmp_path: Path) -> None:
    folder = with_tensors(tmp_path, model__layers__7__mlp__up_proj__weight=torch.ones(2), something=torch.ones(1))
    loaded = load(folder)
    assert len(loaded.notes) == 1
    assert "2 tensors of the checkpoint have no place in LlamaForCausalLM" in loaded.notes[0]
    assert "model.layers.7.mlp.up_proj.weight, something" in loaded.notes[0]
    assert torch.equal(logits(loaded), logits(load(tiny_llama())))


HARMLESS = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    "model.layers.0.self_attn.rotary_emb.cos_cached": torch.ones(8),
    "model.layers.0.self_attn.masked_bias": torch.tensor(-1e9),
    "model.layers.1.self_attn.bias": torch.ones(1, 1, 4, 4),
    "model.layers.1.self_attn.k_scale": torch.ones(1),
    "model.layers.1.self_attn.v_proj.output_scale": torch.ones(1),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_no_weight_is_no_surprise(tmp_path: Path, name: str) -> None:
    """F09: the list of what may be skipped, each with its reason in the code."""
    folder = with_tensors(tmp_path, **{name.replace(".", "__"): HARMLESS[name]})
    assert load(folder).notes == ()


LOST = [
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.1.self_attn.o_proj.bias",
    "model.layers.1.mlp.down_proj.bias",
    "model.layers.0.self_attn.q_norm.weight",
    "model.layers.1.pre_feedforward_layernorm.weight",
    "model.layers.0.input_layernorm.bias",
    "model.embed_norm.weight",
    "model.norm.bias",
    "lm_head.bias",
]


@pytest.mark.parametrize("name", LOST)
def test_a_tensor_of_the_models_own_parts_that_nothing_takes_is_an_error(tmp_path: Path, name: str) -> None:
    """F09: biases and norms that config.json does not tell of are never left out in silence."""
    folder = with_tensors(tmp_path, **{name.replace(".", "__"): torch.ones(64)})
    refused(folder, rf"holds the tensor '{name}', and LlamaForCausalLM has no use for it")


def test_biases_of_zeros_add_nothing(tmp_path: Path) -> None:
    """F09: some tools write one for every layer."""
    folder = with_tensors(tmp_path, model__layers__0__self_attn__q_proj__bias=torch.zeros(64))
    assert torch.equal(logits(load(folder)), logits(load(tiny_llama())))


@pytest.mark.parametrize("name", ["blk.1.attn_q.bias", "blk.0.attn_sinks.weight", "blk.0.attn_qkv.weight", "token_embd_norm.weight", "output_norm.bias"])  # fmt: skip
def test_a_gguf_tensor_that_nothing_takes_is_an_error(tmp_path: Path, name: str) -> None:
    """F09: the same for GGUF files, whose facts are taken from their first layer."""
    path = write_gguf(tiny_llama(), tmp_path / "m.gguf", tensors={name: np.ones(64, np.float32)})
    refused(path, rf"holds the tensor '{name}', and LlamaForCausalLM has no use for it")


def test_a_stored_head_that_differs_is_used_though_the_configuration_ties_it(tmp_path: Path) -> None:
    """F09: as Transformers does, which leaves the two untied."""
    lines: list[str] = []
    folder = tiny_llama(tmp_path / "m", tie_word_embeddings=True)
    tied = load(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(load(folder, progress=lines.append)), logits(tied)) and lines == []
    tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = load(folder, progress=lines.append)
    torch.testing.assert_close(logits(loaded), reference(folder), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(loaded), logits(tied), atol=0.1)
    assert len(lines) == 1 and "lm_head.weight" in lines[0] and "they differ" in lines[0]


def test_a_head_of_its_own_in_a_gguf_file_is_used(tmp_path: Path) -> None:
    """F09: a GGUF file has no flag; what it holds counts."""
    folder = tiny_llama()
    torch.testing.assert_close(
        logits(load(write_gguf(folder, tmp_path / "m.gguf"))), reference(folder), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_a_missing_tensor_is_named_as_the_checkpoint_names_it_load_01(tmp_path: Path, name: str) -> None:
    """Fused projections are named by the part that is missing."""
    refused(with_tensors(tmp_path, drop=name), rf"lacks 1 tensors that LlamaForCausalLM needs: {name} \(an interrupted")


def test_a_tensor_that_the_index_promises_is_missing_in_its_shard_load_01(tmp_path: Path) -> None:
    folder = tiny_sharded(tmp_path / "m")
    shard = folder / "model-00002-of-00002.safetensors"
    tensors = load_file(shard)
    del tensors["model.norm.weight"]
    save_file(tensors, shard)
    refused(folder, r"model-00002-of-00002\.safetensors does not hold tensor 'model\.norm\.weight', although model")


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    folder = tiny_sharded(tmp_path / "m")
    shard = folder / "model-00002-of-00002.safetensors"
    save_file(load_file(shard) | {"model.embed_tokens.weight": torch.ones(512, 64)}, shard)
    refused(folder, r"tensor 'model\.embed_tokens\.weight' is in both")


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model__norm__weight", (65,), r"\[65\], the model's is \[64\]"),
        ("model__layers__0__self_attn__q_proj__weight", (32, 64), r"\[32, 64\], the model's is \[64, 64\]"),
        ("model__layers__1__mlp__down_proj__weight", (128, 64), r"\[128, 64\], the model's is \[64, 128\]"),
        ("model__embed_tokens__weight", (256, 64), r"\[256, 64\], the model's is \[512, 64\]"),
    ],
)
def test_a_wrong_shape_is_named_load_01(tmp_path: Path, name: str, shape: tuple[int, ...], expected: str) -> None:
    folder = with_tensors(tmp_path, **{name: torch.ones(shape)})
    dotted = name.replace("__", r"\.")
    refused(
        folder, rf"tensor '{dotted}' in .*model\.safetensors does not fit LlamaForCausalLM: its shape is {expected}"
    )


def test_whole_numbers_where_floats_belong_are_refused_load_01_qnt_01(tmp_path: Path) -> None:
    name = "model__layers__0__self_attn__o_proj__weight"
    folder = with_tensors(tmp_path, **{name: torch.ones(64, 64, dtype=torch.int32)})
    refused(folder, r"tensor 'model\.layers\.0\.self_attn\.o_proj\.weight' in .* has type I32.*look quantized")


def test_packed_weights_without_their_config_are_refused_qnt_01(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.o_proj."
    packed = {f"{name}qweight".replace(".", "__"): torch.ones(8, 64, dtype=torch.int32)}
    folder = with_tensors(tmp_path, drop=name + "weight", **packed)
    refused(folder, r"lacks 1 tensors .*o_proj\.weight \(its tensors look quantized, but config.json has no quant")


def test_a_quantized_checkpoint_is_refused_before_weights_are_read_qnt_01(tmp_path: Path) -> None:
    config = json.loads((tiny_llama() / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "xyz"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(tmp_path, "xyz", ConfigError)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00002-of-00002.safetensors"])
@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_named_load_01(tmp_path: Path, name: str, keep: float) -> None:
    folder = tiny_llama(tmp_path / "m") if name == "model.safetensors" else tiny_sharded(tmp_path / "m")
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(len(data) * keep)])
    refused(folder, rf"{name} is (empty|cut short).*interrupted download")


def test_a_truncated_gguf_file_is_named_load_01(tmp_path: Path) -> None:
    path = write_gguf(tiny_llama(), tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-40])
    refused(path, r"m\.gguf is cut short: tensor '.*interrupted download")


def test_a_gguf_file_without_a_tensor_is_named(tmp_path: Path) -> None:
    folder = with_tensors(tmp_path, drop="model.layers.1.mlp.up_proj.weight")
    refused(write_gguf(folder, tmp_path / "m.gguf"), r"lacks 1 tensors .*: model\.layers\.1\.mlp\.up_proj\.weight")


def test_weights_of_another_model_are_named(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m")
    save_file({"transformer.wte.weight": torch.ones(4, 4)}, folder / "model.safetensors")
    refused(folder, r"lacks 21 tensors .* such as transformer\.wte\.weight: config\.json of another model\?")


def test_an_unknown_architecture_lists_close_ones(tmp_path: Path) -> None:
    config = json.loads((tiny_llama() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalML"]}))
    refused(
        tmp_path, r"the architecture 'LlamaForCausalML' is not supported; these are: .*; did you mean LlamaForCausalLM"
    )


# ---- memory -------------------------------------------------------------------------------------

_PEAK = """
    import sys
    from pathlib import Path

    def status(field):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(l.split()[1]) for l in lines if l.startswith(field))

    import torch
    from octavo.config.facts import read_model_facts
    from octavo.models.build import BuildSettings
    from octavo.models.loader import WeightSource, load_model
    from octavo.models.packed import PackedFolder
    from octavo.platforms.api import probe
    torch.set_num_threads(1)
    torch.ones(64, 64) @ torch.ones(64, 64)
    facts, device = read_model_facts(sys.argv[1]), probe("cpu")
    settings = BuildSettings(dtype=getattr(torch, sys.argv[2]), device_facts=device, max_model_len=64)
    source = WeightSource(packed=PackedFolder(Path(sys.argv[3]), 1 << 32))
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    loaded = load_model(facts, settings, source)
    peak = status("VmHWM") - before
    if loaded.writing is not None:
        loaded.writing.stop(60)
    print(peak, status("VmHWM") - before, loaded.weight_bytes, loaded.source.startswith("packed"))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("quant", [None, "F32", "Q8_0"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_never_in_memory_twice(tmp_path: Path, quant: str | None, dtype: str) -> None:
    """QNT-5: the peak is what was packed and one linear layer; so is that of a second start, and of keeping the file.

    Mapped pages of the file count too, though the kernel could take them back. What the C library keeps of freed
    buffers does not: up to 64 MiB of them, as many as it comes to by its own rule, so that it is told to keep 1 MiB.
    """
    returning = {**os.environ, "MALLOC_TRIM_THRESHOLD_": str(1 << 20)}
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "vocab_size": 2048}
    path = tiny_llama(tmp_path / "m", **sizes)
    if quant is not None:
        path = write_gguf(path, tmp_path / "m.gguf", quant=quant)
    largest = 2 * 4096 * 1024 * 4  # gate and up, as float32
    for start in ("first", "second"):
        command = [sys.executable, "-c", textwrap.dedent(_PEAK), str(path), dtype, str(tmp_path / "packed")]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=returning)
        peak, with_writing, weights, packed = done.stdout.split()
        assert packed == str(start == "second")
        assert int(weights) > (200 << 20 if dtype == "float32" else 100 << 20)
        for what in (peak, with_writing):
            assert int(what) < int(weights) + largest + (16 << 20), f"{int(what) >> 20} of {int(weights) >> 20} MiB"
