"""Checkpoints for tests: small ones made on the spot, and the real model where it can be had.

Promises: the same arguments give the same files; a folder without `path` is made once per machine and shared,
so tests must not write into it (copy it first, or pass `path`).
Does not know: Octavo's own readers: weights are written by safetensors, and names are Hugging Face's.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support import fixture_tokenizers as tok
from tests.support.smollm2 import smollm2_f32, smollm2_gguf

__all__ = [
    "chain", "cut", "hf_tensors", "smollm2_f32", "smollm2_gguf", "tiny_config", "tiny_llama", "tiny_mistral", "tiny_qwen2", "tiny_qwen3",
    "tiny_sharded", "tiny_swa", "write_checkpoint",
]  # fmt: skip

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def shared_folder() -> Path:
    """Where checkpoints without a path are kept: one folder per user and version of these recipes."""
    here = Path(__file__)
    recipe = hashlib.sha256(here.read_bytes() + (here.parent / "fixture_tokenizers.py").read_bytes()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"octavo-checkpoints-{os.getuid()}" / recipe


def _made(path: Path | None, name: str, settings: Mapping[str, Any], make: Callable[[Path], None]) -> Path:
    """Run `make` on a fresh folder that becomes `path`, or a shared one named by the settings, at one stroke."""
    if path is None:
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=repr).encode()).hexdigest()[:12]
        path = shared_folder() / f"{name}-{digest}"
        if path.exists():
            return path
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=path.parent, prefix=".making-"))
    work.chmod(0o755)
    make(work)
    try:
        if path.exists():
            path.rmdir()  # an empty folder given by the caller
        work.rename(path)
    except OSError:
        shutil.rmtree(work)
        if not (path / "config.json").exists():
            raise
    return path


# ---- random models --------------------------------------------------------------------------


def tiny_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    """config.json of a model with 2 layers, 64 wide; `changes` win, and None removes a key."""
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "dtype": "float32",
    }
    config.update(changes)
    return {k: v for k, v in config.items() if v is not None}


def hf_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float32 weights by Hugging Face's names, with logits spread enough for clear greedy choices."""
    gen = torch.Generator().manual_seed(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    kv, dim = config.get("num_key_value_heads", heads), config.get("head_dim", hidden // heads)
    is_qwen2, is_qwen3 = config["model_type"] == "qwen2", config["model_type"] == "qwen3"

    def matrix(out: int, size: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(out, size, generator=gen) * (gain / size**0.5)

    def near_one(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=gen)

    tied = bool(config.get("tie_word_embeddings"))
    # a tied head with large embeddings would only repeat the last token
    out = {"model.embed_tokens.weight": torch.randn(vocab, hidden, generator=gen) * (0.3 if tied else 1.0)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        out[at + "input_layernorm.weight"] = near_one(hidden)
        for name, size in (("q", heads * dim), ("k", kv * dim), ("v", kv * dim)):
            out[at + f"self_attn.{name}_proj.weight"] = matrix(size, hidden, 1.5)
            if is_qwen2 or config.get("attention_bias"):
                out[at + f"self_attn.{name}_proj.bias"] = torch.randn(size, generator=gen) * 0.1
        out[at + "self_attn.o_proj.weight"] = matrix(hidden, heads * dim, 1.5)
        if config.get("attention_bias") and not is_qwen2:
            out[at + "self_attn.o_proj.bias"] = torch.randn(hidden, generator=gen) * 0.1
        if is_qwen3:
            out[at + "self_attn.q_norm.weight"] = near_one(dim)
            out[at + "self_attn.k_norm.weight"] = near_one(dim)
        out[at + "post_attention_layernorm.weight"] = near_one(hidden)
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            out[at + f"mlp.{name}_proj.weight"] = matrix(rows, columns, 1.5)
            if config.get("mlp_bias"):
                out[at + f"mlp.{name}_proj.bias"] = torch.randn(rows, generator=gen) * 0.1
    out["model.norm.weight"] = near_one(hidden)
    if not tied:
        out["lm_head.weight"] = matrix(vocab, hidden, 2.5)
    return out


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, num_shards: int = 1
) -> None:
    """Write config.json, generation_config.json and the weights, in shards with an index when asked."""
    dtype = getattr(torch, config.get("dtype", "float32"))
    kept = {name: t.to(dtype).contiguous() for name, t in tensors.items()}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    ids = {k: config[k] for k in ("bos_token_id", "eos_token_id") if k in config}
    (folder / "generation_config.json").write_text(json.dumps(ids))
    if num_shards == 1:
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    names = list(kept)
    for i in range(num_shards):
        part = names[i * len(names) // num_shards : (i + 1) * len(names) // num_shards]
        file = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        save_file({n: kept[n] for n in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    size = sum(t.numel() * t.element_size() for t in kept.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _tiny(path: Path | None, config: dict[str, Any], *, seed: int, num_shards: int = 1, adds_bos: bool = True) -> Path:
    def make(folder: Path) -> None:
        write_checkpoint(folder, config, hf_tensors(config, seed), num_shards=num_shards)
        tok.save_tokenizer(
            tok.trained_bpe(min(512, config["vocab_size"]), adds_bos=adds_bos),
            folder,
            chat_template=tok.CHATML,
            config={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        )

    settings = {"config": config, "seed": seed, "shards": num_shards, "bos": adds_bos}
    return _made(path, config["model_type"], settings, make)


def tiny_llama(path: Path | None = None, *, seed: int = 0, adds_bos: bool = True, **changes: Any) -> Path:
    """`tiny-llama`: random Llama; `changes` are keys of config.json (dtype="bfloat16", num_hidden_layers=4, ...)."""
    return _tiny(path, tiny_config("LlamaForCausalLM", **changes), seed=seed, adds_bos=adds_bos)


def tiny_mistral(path: Path | None = None, *, seed: int = 0, **changes: Any) -> Path:
    """Random Mistral without a window, unless `sliding_window` is given."""
    return _tiny(path, tiny_config("MistralForCausalLM", **changes), seed=seed)


def tiny_qwen2(path: Path | None = None, *, seed: int = 0, **changes: Any) -> Path:
    """Random Qwen2: biases on q, k and v, tied embeddings."""
    defaults = {
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
        "tie_word_embeddings": True,
    }
    config = tiny_config("Qwen2ForCausalLM", **{**defaults, "attention_bias": None, **changes})
    return _tiny(path, config, seed=seed, adds_bos=False)


def tiny_qwen3(path: Path | None = None, *, seed: int = 0, **changes: Any) -> Path:
    """Random Qwen3: norms on q and k; heads wider than hidden_size / heads."""
    defaults = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 2, "head_dim": 32}
    return _tiny(path, tiny_config("Qwen3ForCausalLM", **{**defaults, **changes}), seed=seed, adds_bos=False)


def tiny_swa(path: Path | None = None, *, mixed: bool = False, window: int = 64, seed: int = 0, **changes: Any) -> Path:
    """`tiny-swa`: every layer slides (a Mistral), or sliding and full layers alternate (`mixed`, a Qwen3)."""
    if not mixed:
        return tiny_mistral(path, seed=seed, sliding_window=window, **changes)
    num_layers = changes.get("num_hidden_layers", 2)
    kinds = [("sliding_attention", "full_attention")[i % 2] for i in range(num_layers)]
    settings = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0, "layer_types": kinds}
    return tiny_qwen3(path, seed=seed, **{**settings, **changes})


def tiny_sharded(path: Path | None = None, *, seed: int = 0, num_shards: int = 2, **changes: Any) -> Path:
    """`tiny-sharded`: `tiny-llama`'s weights in two safetensors shards with an index."""
    return _tiny(path, tiny_config("LlamaForCausalLM", **changes), seed=seed, num_shards=num_shards)


# ---- scripted models ------------------------------------------------------------------------

CHAIN_SPECIALS = ("<s>", "</s>", "<|user|>", "<|end|>", "<|assistant|>")
CHAIN_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + ('assistant' if message['role'] == 'assistant' else 'user') + '|>' }}"
    "{{ message['content'] or '' }}{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}"
)


def cut(text: str, length: int) -> list[str]:
    """Cut `text` into pieces of `length` characters, longer where a piece was there before, so that all differ."""
    pieces: list[str] = []
    start = 0
    while start < len(text):
        end = start + length
        while text[start:end] in pieces and end < len(text):
            end += 1
        piece = text[start:end]
        if piece in pieces:  # the tail repeats an earlier piece: join it to its neighbour
            piece = pieces.pop() + piece
        pieces.append(piece)
        start = end
    return pieces


def chain(
    path: Path | None,
    segments: Sequence[str | bytes],
    *,
    specials: Iterable[str] = (),
    loop_to: int | None = None,
    template_opens: str = "",
    **changes: Any,
) -> Path:
    """A scripted Llama: each token of the script has the next one as its only likely successor, EOS (id 1) at the end.

    A `str` segment is one token; a `bytes` segment is one token per byte. Names in `specials` are special tokens and
    may be segments. No token may come twice; `loop_to` makes the last segment lead back to segment `loop_to`.
    Tokens outside the script lead to EOS. The chat template ends with `<|assistant|>`, then `template_opens` (one
    token, such as "<think>"); that last token leads to the first segment. A text prompt that is exactly one segment
    becomes its token; any other text becomes bytes. `changes` are keys of config.json.
    """
    special_names = (*CHAIN_SPECIALS, *specials)
    units: list[bytes | str] = []  # a str here is a special token
    firsts: list[int] = []  # index of each segment's first unit
    for segment in segments:
        firsts.append(len(units))
        if isinstance(segment, bytes):
            units += [bytes([b]) for b in segment]
        else:
            units.append(segment if segment in special_names else segment.encode())
    opened = [template_opens.encode()] if template_opens and template_opens not in special_names else []
    pieces = list(dict.fromkeys(u for u in [*units, *opened] if isinstance(u, bytes) and len(u) > 1))
    ids = {name: i for i, name in enumerate(special_names)}
    ids_of_bytes = {bytes([b]): len(special_names) + b for b in range(256)}
    ids_of_bytes |= {p: len(special_names) + 256 + i for i, p in enumerate(pieces)}
    script = [ids[u] if isinstance(u, str) else ids_of_bytes[u] for u in units]
    if len(set(script)) != len(script):
        raise ValueError("a token comes twice in the script; cut it in another way")
    successor = [1] * (len(special_names) + len(ids_of_bytes))
    for now, then in zip(script, [*script[1:], 1 if loop_to is None else script[firsts[loop_to]]], strict=True):
        successor[now] = then
    last = ids["<|assistant|>"]
    if template_opens:
        last = ids[template_opens] if template_opens in ids else ids_of_bytes[template_opens.encode()]
    if last in script:
        raise ValueError("the template's last token is in the script")
    successor[last] = script[0]
    template = CHAIN_TEMPLATE + ("{{ '" + template_opens + "' }}" if template_opens else "") + "{% endif %}"

    def make(folder: Path) -> None:
        config = tiny_config(**_chain_config(len(successor), changes))
        write_checkpoint(folder, config, _chain_tensors(config, successor))
        names = {"bos_token": "<s>", "eos_token": "</s>"}
        tok.save_tokenizer(tok.piece_tokenizer(pieces, special_names), folder, chat_template=template, config=names)

    settings = {"successor": successor, "pieces": pieces, "specials": special_names, "template": template, **changes}
    return _made(path, "chain", settings, make)


def _chain_config(vocab_size: int, changes: Mapping[str, Any]) -> dict[str, Any]:
    size = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 1}
    hidden = -(-vocab_size // 64) * 64  # at least the vocabulary, for an identity embedding
    return {"vocab_size": vocab_size, "hidden_size": hidden, "intermediate_size": 64, **size, **changes}


def _chain_tensors(config: Mapping[str, Any], successor: Sequence[int]) -> dict[str, torch.Tensor]:
    out = {name: torch.zeros_like(t) for name, t in hf_tensors(config).items()}
    for name, tensor in out.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1)
    tokens = torch.arange(len(successor))
    out["model.embed_tokens.weight"][tokens, tokens] = 1
    out["lm_head.weight"][torch.tensor(successor), tokens] = 1
    return out
