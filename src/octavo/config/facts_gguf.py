"""Facts from a GGUF file's metadata and tensor index.

Promises: the same model gives the same facts as its Hugging Face folder would, but for what GGUF leaves out.
Does not know: how tensors are decoded or named in the model.

Source: key names as in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; numbers that GGUF stores in
single precision are rounded to the shortest decimal (1e-05, not 9.99999974e-06), as config.json would have them.
"""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from octavo.base.errors import LoadError
from octavo.base.gguf import GGUFFile, read_gguf
from octavo.config.architectures import not_supported
from octavo.config.facts_base import ModelFacts, RopeFacts

_ARCHITECTURES: Final[Mapping[str, tuple[str, str]]] = {  # general.architecture -> HF architecture, model type
    "llama": ("LlamaForCausalLM", "llama"),  # Mistral too: llama.cpp makes no difference
    "mistral": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
_STORED: Final = {"F16": "float16", "BF16": "bfloat16"}  # everything else is decoded to float32
_SAMPLING: Final = {
    "temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip


def gguf_facts(path: Path) -> ModelFacts:
    """Facts of the file; raises `LoadError` for an architecture that is not known or a key that is missing."""
    file = read_gguf(path)
    arch = str(file.metadata.get("general.architecture", ""))
    if arch not in _ARCHITECTURES:
        raise LoadError(f"{path}: the GGUF architecture {not_supported(arch, _ARCHITECTURES)}")
    architecture, model_type = _ARCHITECTURES[arch]
    keys = _Keys(path, arch, file.metadata)
    if experts := keys.optional("expert_count"):
        raise LoadError(f"{path}: {arch}.expert_count is {experts}, and mixture of experts is not supported here")
    tensors = file.tensors
    if "token_embd.weight" not in tensors:
        raise LoadError(f"{path} has no tensor 'token_embd.weight': it does not hold a whole model")
    heads, hidden = keys.count("attention.head_count"), keys.count("embedding_length")
    head_dim = keys.count("attention.key_length", hidden // heads)
    num_layers = keys.count("block_count")
    rope = _rope(keys, head_dim, file)
    trained = rope.scaling.get("original_max_position_embeddings", keys.count("context_length"))
    return ModelFacts(
        source=str(path),
        format="gguf",
        architecture=architecture,
        model_type=model_type,
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=keys.count("feed_forward_length"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=keys.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position=min(keys.count("context_length"), trained) if rope.grows else keys.count("context_length"),
        dtype=_dtype(file),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon", 1e-6),
        rope=rope,
        layer_windows=(keys.optional("attention.sliding_window"),) * num_layers,
        tie_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        attention_out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        quantization=_quantization(file),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos(file.metadata),
        raw={k: v for k, v in file.metadata.items() if not isinstance(v, list | np.ndarray)},
    )


def gguf_generation_defaults(path: Path) -> tuple[tuple[int, ...], Mapping[str, Any]]:
    """EOS ids, and the sampling defaults that newer files carry."""
    metadata = read_gguf(path, with_tensors=False).metadata
    named = {name: metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return _eos(metadata), {k: _decimal(v) if isinstance(v, float) else v for k, v in named.items() if v is not None}


def _eos(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(int(v) for v in named if v is not None))


def _decimal(value: float) -> float:
    """The shortest decimal that gives the same single-precision number."""
    return float(str(np.float32(value)))


def _dtype(file: GGUFFile) -> str:
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        sizes[_STORED.get(tensor.type.name, "float32")] += tensor.num_elements
    return sizes.most_common(1)[0][0]


def _quantization(file: GGUFFile) -> Mapping[str, Any] | None:
    """The block types of its tensors with how many have each, most first; None when all are plain floats."""
    counts = Counter(tensor.type.name for tensor in file.tensors.values() if tensor.type.block_size > 1)
    return {"quant_method": "gguf", "types": dict(counts.most_common())} if counts else None


def _rope(keys: "_Keys", head_dim: int, file: GGUFFile) -> RopeFacts:
    """Llama 3's scaling is not here: GGUF has it worked out, as the tensor `rope_freqs.weight`."""
    theta = keys.number("rope.freq_base", 10000.0)
    partial = keys.count("rope.dimension_count", head_dim) / head_dim
    kind = str(keys.get("rope.scaling.type") or "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0))
    if kind == "longrope" or _SHORT_FACTORS in file.tensors:
        return RopeFacts(theta=theta, kind="longrope", partial=partial, scaling=_longrope(keys, file))
    if kind == "yarn":
        return RopeFacts(theta=theta, kind="yarn", partial=partial, scaling=_yarn(keys, factor))
    if kind not in ("none", "linear"):
        raise LoadError(f"{keys.path} has rotary scaling {kind!r}, which is not supported for GGUF files")
    if keys.number("rope.scaling.attn_factor", 1.0) != 1.0:
        raise LoadError(f"{keys.path} has rotary scaling {kind!r} with an attn_factor, which is not supported")
    if factor in (0.0, 1.0) or (kind == "none" and keys.get("rope.scaling.type")):
        return RopeFacts(theta=theta, partial=partial)
    return RopeFacts(theta=theta, kind="linear", partial=partial, scaling={"factor": factor})


_SHORT_FACTORS: Final = "rope_factors_short.weight"


def _longrope(keys: "_Keys", file: GGUFFile) -> dict[str, Any]:
    """Hugging Face's names; the factors are tensors of the file."""
    found = file.tensors.get(_SHORT_FACTORS)
    if found is None or found.type.name != "F32":
        raise LoadError(f"{keys.path} has rotary scaling 'longrope' and no tensor {_SHORT_FACTORS!r} of type F32")
    declared = keys.count("context_length")
    original = keys.count("rope.scaling.original_context_length", declared)
    return {
        "short_factor": found.data.view(np.float32).tolist(),
        "original_max_position_embeddings": original,
        "factor": declared / original,
        "attention_factor": keys.number("rope.scaling.attn_factor", 1.0),
    }


def _yarn(keys: "_Keys", factor: float) -> dict[str, float]:
    """Hugging Face's names; llama.cpp's attention factor multiplies YaRN's own (arXiv 2309.00071, eq. 22)."""
    original = keys.count("rope.scaling.original_context_length", keys.count("context_length"))
    scaling = {"factor": factor or 1.0, "original_max_position_embeddings": original}
    for name in ("beta_fast", "beta_slow"):
        if keys.get(f"rope.scaling.yarn_{name}") is not None:
            scaling[name] = keys.number(f"rope.scaling.yarn_{name}", 0.0)
    extra = keys.number("rope.scaling.attn_factor", 1.0)
    if extra != 1.0:
        scaling["attention_factor"] = extra * (1 + 0.1 * math.log(max(factor, 1.0)))
    return scaling


class _Keys:
    """Checked access to the keys under the architecture's prefix."""

    def __init__(self, path: Path, arch: str, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self._prefix = arch + "."
        self._metadata = metadata

    def get(self, name: str) -> Any:
        return self._metadata.get(self._prefix + name)

    def optional(self, name: str) -> int | None:
        """A positive whole number; 0 and a missing key are both None. Per-layer lists must be all equal."""
        value = self.get(name)
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                raise LoadError(f"{self.path}: {self._prefix}{name} differs by layer, which is not supported")
            value = value.tolist()[0]
        if value is None or value == 0:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise LoadError(f"{self.path}: {self._prefix}{name} must be a positive whole number, got {value!r}")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.optional(name)
        if value is None:
            value = default
        if value is None:
            raise LoadError(f"{self.path} lacks {self._prefix + name!r} in its metadata")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise LoadError(f"{self.path}: {self._prefix}{name} must be a number, got {value!r}")
        return _decimal(float(value))
