"""GGUF files for tests, written by the `gguf` package from a Hugging Face folder as llama.cpp's converter would.

Promises: q and k rows of Llama models are put in llama.cpp's order; every other tensor keeps its values.
Does not know: Octavo's reader.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    folder: Path,
    path: Path,
    *,
    quant: str = "F32",
    quants: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Convert a folder with one safetensors file; matrices are stored as `quant`, vectors as F32.

    `quants` gives those whose name has a part another type: {"v_proj": "Q8_0"}.

    `metadata` and `tensors` are added under their own names.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = _ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, arch)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    for key, value in (metadata or {}).items():
        kind = gguf.GGUFValueType.get_type(value)
        inner = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(key, value, kind, inner)
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.float()
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = _pairs_side_by_side(values, heads if ".q_proj." in name else kv_heads)
        found = [other for part, other in (quants or {}).items() if part in name]
        kind = gguf.GGMLQuantizationType[(found or [quant])[0] if values.dim() == 2 else "F32"]
        writer.add_tensor(_gguf_name(name), gguf.quantize(values.numpy(), kind), raw_dtype=kind)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _pairs_side_by_side(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape).contiguous()


def _gguf_name(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{ending}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{ending}"
