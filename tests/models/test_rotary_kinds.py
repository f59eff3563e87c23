"""Every rotary kind that Transformers knows, within and beyond the trained length, as published configurations set it.

`python -m tests.models.test_rotary_kinds` prints the largest differences as a table.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.base.errors import ConfigError, LoadError
from octavo.config.facts import DeviceFacts, read_model_facts
from octavo.config.resolve import resolve
from octavo.config.schema import EngineConfig, ModelConfig
from octavo.layers.rotary import KINDS, RotaryTable
from octavo.models.build import BuildSettings
from octavo.models.loader import load_model
from octavo.ops import reference
from tests.models.oracle import CPU_FACTS, PagedRun, hf_logits
from tests.support.checkpoints import tiny_llama, tiny_qwen2, tiny_qwen3
from tests.support.gguf_files import write_gguf

DEVICE = DeviceFacts(kind="cpu", name="t", memory_total_bytes=1 << 34, memory_available_bytes=1 << 34, num_cores=1)
SHORT, LONG = [1.0 + 0.05 * i for i in range(8)], [1.0 + 2.0 * i for i in range(8)]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
NEW, OLD = "rope_parameters", "rope_scaling"

# name -> (keys of config.json, trained length). Names begin with the kind.
CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "default": ({NEW: {"rope_type": "default", "rope_theta": 5e5}}, 64),
    "default, a share that Llama does not look at": ({NEW: {"rope_theta": 1e4}, "partial_rotary_factor": 0.5}, 64),
    "linear": ({NEW: {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, 64),
    "linear, old keys": ({NEW: None, "rope_theta": 1e4, OLD: {"type": "linear", "factor": 2.5}}, 64),
    "dynamic": ({NEW: {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, 64),
    "dynamic, old keys, both lengths": (
        {NEW: None, "rope_theta": 1e4, OLD: {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}},
        64,
    ),
    "llama3": ({NEW: {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, "max_position_embeddings": 512}, 64),
    "llama3, old keys": (
        {NEW: None, "rope_theta": 5e5, OLD: {"rope_type": "llama3", **LLAMA3, "factor": 32.0}, "max_position_embeddings": 512},
        64,
    ),
    "llama3, the trained length beside it": (
        {
            NEW: {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
            "original_max_position_embeddings": 32,
            "max_position_embeddings": 512,
        },
        32,
    ),
    "yarn": ({NEW: {"rope_type": "yarn", "rope_theta": 1e6, **YARN}}, 64),
    "yarn, the long length declared": (
        {NEW: None, "rope_theta": 1e6, OLD: {"type": "yarn", **YARN}, "max_position_embeddings": 256},
        64,
    ),
    "yarn, a declared length in between": (
        {NEW: None, "rope_theta": 1e6, OLD: {"rope_type": "yarn", **YARN}, "max_position_embeddings": 80},
        64,
    ),
    "yarn, no factor": (
        {NEW: {"rope_type": "yarn", "rope_theta": 1e6, **YARN, "factor": None}, "max_position_embeddings": 192},
        64,
    ),
    "yarn, no trained length": ({NEW: {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, 64),
    "yarn, the trained length beside it": (
        {
            NEW: {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
            "original_max_position_embeddings": 32,
            "max_position_embeddings": 128,
        },
        32,
    ),
    "yarn, attention_factor": ({NEW: {"rope_type": "yarn", "rope_theta": 1e6, **YARN, "attention_factor": 0.8}}, 64),
    "yarn, betas and no truncation": (
        {NEW: {"rope_type": "yarn", "rope_theta": 15e4, **YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}},
        64,
    ),
    "yarn, mscale": (
        {NEW: {"rope_type": "yarn", "rope_theta": 1e4, **YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
        64,
    ),
    "longrope": (
        {
            NEW: {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT, "long_factor": LONG},
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 512,
        },
        64,
    ),
    "longrope, old keys, factors said": (
        {
            NEW: None,
            "rope_theta": 1e4,
            OLD: {
                "type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 16.0, "attention_factor": 1.1,
                "original_max_position_embeddings": 64,
            },
            "max_position_embeddings": 512,
        },
        64,
    ),
    "proportional": ({NEW: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}}, 64),
    "proportional, factor": (
        {NEW: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "factor": 8.0}},
        64,
    ),
}  # fmt: skip
GROWS = ("dynamic", "longrope")  # beyond the trained length these are refused


def folder_of(name: str, path: Path, maker: Any = tiny_llama) -> Path:
    changes = {"max_position_embeddings": 64, **CONFIGS[name][0]}
    return maker(path, **changes)


def max_len(folder: Path, asked: int | None = None) -> int:
    """The context that a start with this `--max-model-len` has. Raises `ConfigError` where it is refused."""
    config = EngineConfig(model=ModelConfig(max_model_len=asked))
    return resolve(config, read_model_facts(folder), DEVICE).config.model.max_model_len or 0


def prompt(length: int) -> list[int]:
    return torch.randint(5, 500, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def our_logits(place: Path, length: int) -> torch.Tensor:
    settings = BuildSettings(
        dtype=torch.float32, device_facts=CPU_FACTS, max_model_len=max_len(place, length), block_size=16
    )
    model = load_model(read_model_facts(place), settings).model
    return PagedRun(model, 1, length).step({0: prompt(length)})[0]


def difference(folder: Path, length: int, place: Path | None = None) -> float:
    """Largest difference between our logits (of a GGUF file when `place` is one) and Transformers' for one prompt."""
    theirs = hf_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), prompt(length))
    return float((our_logits(place or folder, length) - theirs).abs().max())


def table_difference(folder: Path, length: int) -> float:
    """Largest difference of cos and sin at any position of a sequence of `length`."""
    facts, config = read_model_facts(folder), AutoConfig.from_pretrained(folder)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    table = RotaryTable(facts.rope, facts.head_dim, facts.max_position, length, gather=reference.gather_rows)
    table.finish()
    half = facts.head_dim // 2
    return max(float((ours - their[0, :, :half]).abs().max()) for ours, their in zip(table.table.split(half, 1), (cos, sin), strict=True))  # fmt: skip


def lengths(name: str) -> tuple[int, int]:
    trained = CONFIGS[name][1]
    return trained - 4, 2 * trained - 3


def test_every_kind_of_transformers_is_here() -> None:
    """F08: a new one in Transformers fails here until it is built or refused by name."""
    assert set(KINDS) == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("name", CONFIGS)
def test_each_kind_is_as_transformers_has_it_within_and_beyond_or_refused_by_name(name: str, tmp_path: Path) -> None:
    """F08: logits within 1e-4, on prompts shorter and longer than the model was trained for."""
    folder = folder_of(name, tmp_path / "m")
    within, beyond = lengths(name)
    assert difference(folder, within) < 1e-4
    if name.startswith(GROWS):
        kind = name.split(",")[0]
        with pytest.raises(ConfigError, match=rf"--max-model-len {beyond} is more than .* rotary scaling '{kind}'"):
            max_len(folder, beyond)
        assert max_len(folder) == CONFIGS[name][1]
    elif name.startswith(("default", "proportional")):
        assert max_len(folder) == 64  # the author declares no more
    else:
        assert difference(folder, beyond) < 1e-4


@pytest.mark.parametrize("name", [n for n in CONFIGS if not n.startswith(GROWS)])
def test_the_table_is_transformers_far_beyond_the_trained_length(name: str, tmp_path: Path) -> None:
    """F08: cos and sin at 20,000 positions, whatever length an engine would serve."""
    assert table_difference(folder_of(name, tmp_path / "m"), 20_000) < 1e-4


@pytest.mark.parametrize("maker", [tiny_qwen2, tiny_qwen3])
def test_qwen_with_yarn_as_its_authors_advise(maker: Any, tmp_path: Path) -> None:
    """F08: rope_scaling added to a config.json whose declared length stays the short one."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    folder = maker(tmp_path / "m", rope_parameters=None, rope_theta=1e6, rope_scaling=yarn, max_position_embeddings=80)
    assert max_len(folder) == 256
    assert difference(folder, 60) < 1e-4 and difference(folder, 200) < 1e-4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({NEW: {"rope_type": "axial", "rope_theta": 1e4}}, "'axial' is not supported"),
        ({NEW: {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        (
            {NEW: {"rope_type": "longrope", "short_factor": [1.0] * 7, "long_factor": LONG}},
            "short_factor has 7 entries",
        ),
        (
            {NEW: {"rope_type": "longrope", "short_factor": ["x"], "long_factor": LONG}},
            "short_factor .* list of numbers",
        ),
        ({NEW: {"rope_type": "longrope", "long_factor": LONG}}, "lacks the key 'short_factor'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    """F08."""
    folder = tiny_llama(tmp_path / "m", max_position_embeddings=64, **changes)
    with pytest.raises(LoadError, match=words):
        our_logits(folder, 32)


GGUF_KEYS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, list[float]], int]] = {
    "linear": (CONFIGS["linear"][0], {"type": "linear", "factor": 4.0}, {}, 64),
    "yarn": (
        {**CONFIGS["yarn"][0], "max_position_embeddings": 256},
        {"type": "yarn", "factor": 4.0, "original_context_length": 64},
        {},
        200,
    ),
    "yarn, betas": (
        {NEW: {"rope_type": "yarn", "rope_theta": 1e6, **YARN, "beta_fast": 16.0, "beta_slow": 2.0}, "max_position_embeddings": 256},
        {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
        {},
        200,
    ),
    "longrope": (
        CONFIGS["longrope, old keys, factors said"][0],
        {"type": "longrope", "original_context_length": 64, "attn_factor": 1.1},
        {"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG},
        60,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GGUF_KEYS)
def test_gguf_s_keys_and_factor_tensors_mean_the_same(name: str, tmp_path: Path) -> None:
    """F08: `rope.scaling.*` and the tensors of factors, against Transformers on the folder the file was made from."""
    changes, keys, tensors, length = GGUF_KEYS[name]
    folder = tiny_llama(tmp_path / "m", **{"max_position_embeddings": 64, **changes, "rope_scaling": changes.get(OLD)})
    config = json.loads((folder / "config.json").read_text())
    theta = (config.get(NEW) or config)["rope_theta"]
    source = tmp_path / "plain"  # what the writer reads: keys of the new layout
    shutil.copytree(folder, source)
    (source / "config.json").write_text(json.dumps(config | {NEW: {"rope_theta": theta}}))
    file = write_gguf(
        source,
        tmp_path / "m.gguf",
        metadata={f"llama.rope.scaling.{key}": value for key, value in keys.items()},
        tensors={key: np.array(value, np.float32) for key, value in tensors.items()},
    )
    assert difference(folder, length, file) < 1e-4
    if name == "longrope":
        assert max_len(file) == 64
        with pytest.raises(ConfigError, match="rotary scaling 'longrope'"):
            max_len(file, 65)


def _report() -> None:
    """Print the table of F08: kind by (within, beyond), logits; and cos and sin at 20,000 positions."""
    rows = [("configuration", "within", "beyond", "cos, sin at 20,000")]
    for name in CONFIGS:
        with tempfile.TemporaryDirectory() as place:
            folder = folder_of(name, Path(place) / "m")
            within, beyond = lengths(name)
            first = f"{difference(folder, within):.1e}"
            try:
                second = f"{difference(folder, beyond):.1e}"
            except ConfigError as error:
                second = "refused" if "rotary scaling" in str(error) else "not declared"
            far = "-" if name.startswith(GROWS) else f"{table_difference(folder, 20_000):.1e}"
            rows.append((name, first, second, far))
    for row in rows:
        sys.stdout.write(f"{row[0]:<48} {row[1]:>9} {row[2]:>13} {row[3]:>20}\n")


if __name__ == "__main__":
    _report()
