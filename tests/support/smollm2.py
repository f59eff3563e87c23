"""The real model for tests: SmolLM2-135M-Instruct, as GGUF and as a float32 Hugging Face folder.

Promises: the float32 folder is made by the `gguf` package, independent of Octavo's own reader, once per machine.
Does not know: how the file is fetched (see `octavo.config.embedded`).
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from octavo.base.errors import LoadError
from octavo.config.embedded import fetch_embedded_model
from octavo.config.env import read_env
from tests.support.fixture_tokenizers import save_tokenizer

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type


def smollm2_gguf() -> Path:
    """The Q4_1 GGUF file from the cache folder, fetched when it is not there; skips the test when it cannot be had."""
    try:
        return fetch_embedded_model(read_env().cache_dir, print)
    except (LoadError, OSError) as err:
        if os.environ.get("CI"):
            raise  # a run that counts does not pass by skipping the truth
        pytest.skip(f"the real model is not here: {err}")


def smollm2_f32() -> Path:
    """The same weights in float32, as a Hugging Face folder beside the cached GGUF file."""
    source = smollm2_gguf()
    place = source.parent / "smollm2-135m-f32"
    if not (place / "config.json").exists():
        work = Path(tempfile.mkdtemp(dir=source.parent, prefix=".making-"))
        write_hf_folder(source, work)
        work.chmod(0o755)
        try:
            work.rename(place)
        except OSError:  # somebody else was faster
            shutil.rmtree(work)
    return place


def write_hf_folder(source: Path, folder: Path) -> None:
    """Dequantize a Llama GGUF file into a float32 Hugging Face folder, with tokenizer and configs."""
    import gguf

    reader = gguf.GGUFReader(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    tensors: dict[str, torch.Tensor] = {}
    for t in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).astype("float32"))
        if ".attn_q." in t.name or ".attn_k." in t.name:
            values = _split_halves(values, heads if ".attn_q." in t.name else kv_heads)
        tensors[_hf_name(t.name)] = values.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_configs(meta, folder, tied="lm_head.weight" not in tensors)
    _write_tokenizer(meta, folder)


def _split_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of rows: pairs (0, 1), (2, 3).. rotate together there, halves here."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _hf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _write_configs(meta: dict[str, Any], folder: Path, *, tied: bool) -> None:
    ids = {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.embedding_length"] // meta["llama.attention.head_count"],
        "hidden_act": "silu",
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": round(meta["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_parameters": {"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
        **ids,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(ids))


def _write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    names: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ", 1)) for m in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    special = [name for name, kind in zip(names, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    config: dict[str, Any] = {k: names[meta[f"tokenizer.ggml.{v}_token_id"]] for k, v in roles.items()}
    config["model_max_length"] = meta["llama.context_length"]
    save_tokenizer(tokenizer, folder, chat_template=meta["tokenizer.chat_template"], config=config)
