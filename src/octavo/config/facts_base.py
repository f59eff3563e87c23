"""The values that say what a model and a device are.

Promises: frozen; `ModelFacts` says everything the engine needs to know of a model without its weights.
Does not know: how they are read (see `config.facts`), intent (what the user wants) or decisions (what was chosen).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeFacts:
    """Rotary embedding of a model. `scaling` holds the checkpoint's own keys for its `kind`."""

    theta: float = 10000.0
    kind: str = "default"  # default, linear, dynamic, llama3, yarn, longrope, proportional
    partial: float = 1.0  # share of the head that is rotated
    scaling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def grows(self) -> bool:
        """True for kinds that turn a whole sequence in another way once it is longer than the model was trained for.

        Keys in the cache stay turned as they were, so such sequences are not served.
        """
        return self.kind in ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a checkpoint says about itself, from `config.json` or GGUF metadata.

    `layer_windows[i]` is layer i's sliding window in tokens, None for full attention.
    `raw` is the source's own mapping, for architectures that need more.
    """

    source: str  # folder or file
    format: str  # "hf" or "gguf"
    architecture: str  # as in Hugging Face's `architectures`: LlamaForCausalLM, ...
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # tokens
    dtype: str  # the checkpoint's, without "torch."
    activation: str = "silu"
    norm_eps: float = 1e-6
    rope: RopeFacts = RopeFacts()
    layer_windows: tuple[int | None, ...] = ()
    tie_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: Mapping[str, Any] | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What a device is and has; made by `platforms`, used by everybody."""

    kind: str  # "cpu", "cuda"
    name: str
    memory_total_bytes: int
    memory_available_bytes: int  # to this process, cgroup limits respected
    num_cores: int  # that this process may use
    capability: tuple[str, ...] = ()  # instruction sets or compute capability, e.g. "avx512_bf16"
    count: int = 1
