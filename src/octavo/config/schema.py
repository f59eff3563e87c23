"""Every option, once: name, default, unit and help text.

Promises: one definition per option gives the flag, the environment variable, the YAML key, the
Python field, the help text and the reference page (OPS-2). All values are frozen.
Does not know: models, devices, or how values are decided (see `config.resolve`).

A field whose default is None is *not set*: `config.resolve` decides it and says why, or it means what its help says.
"""

from dataclasses import dataclass, field
from typing import Any


def option(default: Any, help: str, *, unit: str = "", choices: tuple[str, ...] = (), **extra: Any) -> Any:
    """A dataclass field that is an option. `extra` may hold `kind` ('size', 'count', 'list', 'path'), `several`, and
    `value`, what help calls it."""
    return field(default=default, metadata={"help": help, "unit": unit, "choices": choices, **extra})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is read."""

    model: str | None = option(
        None, "Model: a folder, a GGUF file, or a name to pull; the built-in SmolLM2 when not given.", value="MODEL"
    )
    served_model_name: tuple[str, ...] | None = option(
        None,
        "Names that clients may use for the model; its own name when not given.",
        kind="list",
        several=True,
        value="NAME",
    )
    dtype: str = option(
        "auto",
        "Type to compute in; auto is bfloat16 where the device computes it, else float32.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    max_model_len: int | None = option(None, "Longest prompt plus answer; the model's own limit, fitted to the memory, when not given.", unit="tokens", kind="count")  # fmt: skip
    seed: int = option(0, "Seed from which requests without one derive theirs.")
    logprobs_mode: str = option(
        "raw_logprobs",
        "What is given as log-probabilities: the model's own, or what masks, penalties, temperature and truncation left of them; or the logits themselves.",
        choices=("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"),
    )
    chat_template: str | None = option(
        None, "Chat template: a file, or the text itself; the model's own when not given.", kind="path", value="FILE"
    )
    pre_tokenizer: str | None = option(
        None,
        "How the text of a GGUF file with a byte-level vocabulary is cut before it is tokenized, by a name such as "
        "llama-bpe or qwen2; as the file says when not given.",
        value="NAME",
    )
    generation_config: str = option(
        "auto",
        "Default sampling parameters: auto reads the model's generation_config.json, neutral ignores it, or a folder.",
        value="FOLDER",
    )
    quantization: str | None = option(
        None,
        "How weights are kept: none, int8_per_channel, int4_group, or JSON with a scheme, ignore and targets; as the "
        "checkpoint has them when not given.",
        value="METHOD",
    )
    load_format: str = option("auto", "How weights are read; dummy makes random ones.", choices=("auto", "safetensors", "gguf", "dummy"))  # fmt: skip
    weight_cache: str = option(
        "auto",
        "Keep packed weights, so that the next start is quick: auto in the cache folder, off, or a folder.",
        kind="path",
        value="FOLDER",
    )
    weight_cache_size: int = option(
        32 << 30,
        "Most that packed weights may take there; what was used longest ago goes first.",
        unit="bytes",
        kind="size",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """KV memory."""

    block_size: int | None = option(None, "Tokens in one KV block; what the attention backend prefers when not given.", unit="tokens")  # fmt: skip
    kv_cache_dtype: str = option(
        "auto",
        "Type of keys and values in the cache: auto is the model's; fp8 and int8 take half the memory of bfloat16, and "
        "a scale for each token and head.",
        choices=("auto", "bfloat16", "fp8", "int8"),
    )
    kv_cache_memory: int | None = option(None, "Memory for KV blocks, such as 2GiB.", unit="bytes", kind="size")
    num_kv_blocks: int | None = option(None, "Number of KV blocks; wins over the memory size.", unit="blocks")
    gpu_memory_utilization: float | None = option(
        None, "Share of the device's memory (of the host's on a CPU) for weights and KV together.", unit="0..1"
    )
    enable_prefix_caching: bool = option(True, "Reuse the KV of prefixes that were computed before.")
    hybrid_kv_cache: bool = option(
        True,
        "Give back blocks that a layer's sliding window has passed. Without it such layers keep the whole context, as "
        "those with full attention do, and compute the same.",
    )
    kv_cache_layout: str = option(
        "block",
        "What lies side by side in KV memory: all layers' keys and values of a block, or all blocks of a layer.",
        choices=("block", "layer"),
    )
    prefix_hash: str = option("sha256", "Hash of the prefix cache.", choices=("sha256", "xxhash"))
    kv_events: bool = option(
        False,
        "Tell at GET /v1/kv/events which prefixes the cache holds, for octavo route and whoever else chooses by it.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How much runs at once, and in which order."""

    max_num_seqs: int | None = option(None, "Most requests in one step; 256 on a GPU, 128 on a CPU.", unit="requests")
    max_num_active_seqs: int | None = option(None, "Most requests running at once; as max_num_seqs when not given.", unit="requests")  # fmt: skip
    max_num_batched_tokens: int | None = option(None, "Most tokens computed in one step.", unit="tokens", kind="count")
    max_num_scheduled_tokens: int | None = option(
        None,
        "Most tokens that a step is given, guessed ones (drafts) aside, which may fill it up to max_num_batched_tokens; "
        "the same when not given.",
        unit="tokens",
        kind="count",
    )
    scheduling_policy: str = option("fcfs", "Who goes first.", choices=("fcfs", "priority"))
    priority_aging_s: float = option(
        0.0,
        "Under the priority policy, waiting this long improves the priority by one; 0 turns it off.",
        unit="seconds",
    )
    long_prefill_token_threshold: int = option(
        0, "Most tokens of one prompt in a step while others wait; 0: no limit but the fair share.", unit="tokens"
    )
    kv_watermark: float = option(
        0.01, "Share of blocks kept free when a request is admitted beside others.", unit="0..1"
    )
    async_scheduling: bool | None = option(None, "Schedule the next step while this one runs; decided by the device when not given.")  # fmt: skip
    check_invariants: bool = option(
        False, "Check the books of requests and blocks after every step: slow, for finding faults."
    )
    max_waiting_requests: int = option(
        2048, "Answers that may wait for their first token; more are refused with 429.", unit="answers"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Where and how it computes."""

    device: str = option("auto", "Device to run on: auto, cpu, cuda, or one that a plugin brings.", value="NAME")
    distributed_executor_backend: str = option(
        "uni",
        "What runs the worker: uni (a thread of the engine's process), or one that a plugin brings.",
        value="NAME",
    )
    num_threads: int | None = option(None, "Compute threads; the cores this process may use when not given.", unit="threads")  # fmt: skip
    attention_backend: str | None = option(
        None, "Attention backend by name; the first that fits when not given.", value="NAME"
    )
    kernels: str = option(
        "auto",
        "What computes on a CPU: auto takes the best instructions there are, reference PyTorch's own operators; a level of instructions is for comparing.",
        choices=("auto", "reference", "scalar", "avx2", "avx512", "avx512_bf16", "amx"),
    )
    multiprocessing: bool = option(
        True,
        "Run the engine core in a process of its own (--no-multiprocessing to debug); the Python class does so only when asked.",
    )
    hang_timeout_s: float = option(
        120.0,
        "How long a server's engine may show no sign of life (no step ends, none computes) until its requests end with an "
        "error and the server ends; a step that computes may take ten times as long; 0: for ever.",
        unit="seconds",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig:
    """Installed packages that extend the engine; OCTAVO_PLUGINS selects them."""

    require_plugin: tuple[str, ...] | None = option(None, "Plugin of any group without which the start fails; may be repeated.", kind="list", value="NAME")  # fmt: skip
    logits_processors: tuple[str, ...] | None = option(None, "Class that changes logits before a token is chosen, as module:Class, besides those of installed packages; may be repeated.", kind="list", several=True, value="MODULE:CLASS")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server; not part of the engine."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all.", value="ADDRESS")
    port: int = option(8000, "Port to listen on.", value="PORT")
    api_key: tuple[str, ...] | None = option(None, "Key that clients must send as a bearer token; may be repeated.", kind="list", value="KEY")  # fmt: skip
    log_level: str = option("info", "How much is logged.", choices=("debug", "info", "warning", "error"))
    disable_access_log: bool = option(False, "Do not log each HTTP request.")
    stats_interval_s: float = option(10.0, "Time between two lines of figures in the log while there is work; 0: none.", unit="seconds")  # fmt: skip
    max_request_bytes: int = option(32 << 20, "Largest request body.", unit="bytes", kind="size")
    drain_timeout_s: float = option(15.0, "How long a stop waits for running requests.", unit="seconds")
    allowed_origins: tuple[str, ...] | None = option(None, "Origins whose web pages may call the server, * for any; none when not given.", kind="list", value="ORIGIN")  # fmt: skip
    trust_request_chat_template: bool = option(False, "Let a request bring its own chat template.")
    stream_keep_alive_s: float = option(15.0, "Silence in a stream after which a comment keeps the connection open.", unit="seconds")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The root: seen where an engine is put together, or its plan explained, and by no component."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    device: DeviceConfig = DeviceConfig()
    plugins: PluginConfig = PluginConfig()
    features: dict[str, Any] = field(default_factory=dict)  # options of features that were given any, by feature
