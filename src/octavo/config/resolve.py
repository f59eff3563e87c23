"""Intent and facts to one complete configuration, with a reason for every value.

Promises: ordered pure rules; each decision is recorded as (field, old, new, why); the result is frozen and
nothing is written back later.
Does not know: weights, layouts or what a running engine measured.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.base.errors import ConfigError
from octavo.config.facts import DeviceFacts, ModelFacts
from octavo.config.quantization import NONE, plan_quantization
from octavo.config.schema import EngineConfig

CPU_MAX_NUM_SEQS = 128
GPU_MAX_NUM_SEQS = 256
CPU_MAX_BATCHED_TOKENS = 2048
GPU_MAX_BATCHED_TOKENS = 8192
MAX_SEQS = 1 << 16  # rows for which arrays are kept, filled or not
MAX_BATCHED_TOKENS = 1 << 24
MAX_BLOCK_SIZE = 1 << 20
MAX_THREADS = 1024  # the thread library ends the process when it cannot start what was asked for
CPU_KV_SHARE = 0.20  # of the memory available to the process
BF16_CAPABILITIES = frozenset({"avx512_bf16", "amx_bf16", "bf16", "cuda"})


@dataclass(frozen=True, slots=True)
class Decision:
    """One rule's outcome. `old` is what was given (None: not set)."""

    field: str
    old: Any
    new: Any
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The complete configuration and how it came about."""

    config: EngineConfig
    decisions: tuple[Decision, ...]
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    config: EngineConfig
    facts: ModelFacts
    device: DeviceFacts


Rule = Callable[[_State], list[Decision]]


def resolve(
    config: EngineConfig, facts: ModelFacts, device: DeviceFacts, sources: Mapping[str, str] | None = None
) -> Resolved:
    """Apply the rules in order; raises `ConfigError` for settings that cannot work together."""
    decisions: list[Decision] = []
    state = _State(config=config, facts=facts, device=device)
    for rule in RULES:
        made = rule(state)
        decisions += made
        for decision in made:
            state = dataclasses.replace(state, config=_with(state.config, decision))
    return Resolved(config=state.config, decisions=tuple(decisions), sources=dict(sources or {}))


def _with(config: EngineConfig, decision: Decision) -> EngineConfig:
    section, name = decision.field.split(".")
    part = dataclasses.replace(getattr(config, section), **{name: decision.new})
    return dataclasses.replace(config, **{section: part})


def _device(s: _State) -> list[Decision]:
    asked = s.config.device.device
    if asked == "auto":
        return [Decision("device.device", None, s.device.kind, f"found {s.device.name}")]
    if asked != s.device.kind:
        raise ConfigError(f"--device {asked} was asked for, but this machine offers {s.device.kind}; leave it out.")
    return []


def _dtype(s: _State) -> list[Decision]:
    if s.config.model.dtype != "auto":
        return []
    fast = bool(BF16_CAPABILITIES & set(s.device.capability)) or s.device.kind == "cuda"
    if fast:
        why = f"checkpoint is {s.facts.dtype}; the device computes bfloat16"
        return [Decision("model.dtype", "auto", "bfloat16", why)]
    return [Decision("model.dtype", "auto", "float32", "the processor has no bfloat16 instructions")]


def _quantization(s: _State) -> list[Decision]:
    """Refuses early what cannot run; a GGUF file is dequantized for one who asked for float32."""
    asked, exact = s.config.model.quantization, s.config.model.dtype == "float32"
    if asked is None and s.facts.format == "gguf" and s.facts.quantization is not None and exact:
        return [Decision("model.quantization", None, NONE, "float32 was asked for: no value is rounded again")]
    plan = plan_quantization(asked, s.facts, s.device)
    if asked is not None or plan.method == NONE:
        return []
    return [Decision("model.quantization", None, plan.method, f"the checkpoint's weights are {plan.text}")]


def _max_model_len(s: _State) -> list[Decision]:
    limit, asked, rope = s.facts.max_position, s.config.model.max_model_len, s.facts.rope
    if asked is None:
        why = f"what the model was trained for; its rotary scaling {rope.kind!r} is not supported beyond"
        return [Decision("model.max_model_len", None, limit, why if rope.grows else "the model's own limit")]
    if asked < 2:
        raise ConfigError(f"--max-model-len must be at least 2 tokens, got {asked}.")
    if asked > limit and rope.grows:
        raise ConfigError(
            f"--max-model-len {asked} is more than the {limit} positions that the model was trained for: beyond them its "
            f"rotary scaling {rope.kind!r} turns cached keys in another way, which is not supported; use at most {limit}."
        )
    if asked > limit:
        raise ConfigError(f"--max-model-len {asked} is more than the model's {limit} positions; use at most {limit}.")
    return []


def _num_seqs(s: _State) -> list[Decision]:
    sched = s.config.scheduler
    made: list[Decision] = []
    seqs = sched.max_num_seqs
    if seqs is None:
        seqs = GPU_MAX_NUM_SEQS if s.device.kind == "cuda" else CPU_MAX_NUM_SEQS
        made.append(Decision("scheduler.max_num_seqs", None, seqs, f"default on {s.device.kind}"))
    elif not 1 <= seqs <= MAX_SEQS:
        raise ConfigError(f"--max-num-seqs must be in 1..{MAX_SEQS}, got {seqs}.")
    active = sched.max_num_active_seqs
    if active is None:
        made.append(Decision("scheduler.max_num_active_seqs", None, seqs, "as max_num_seqs"))
    elif not 1 <= active <= seqs:
        raise ConfigError(f"--max-num-active-seqs must be in 1..{seqs} (max_num_seqs), got {active}.")
    return made


def _batched_tokens(s: _State) -> list[Decision]:
    asked = s.config.scheduler.max_num_batched_tokens
    if asked is None:
        default = GPU_MAX_BATCHED_TOKENS if s.device.kind == "cuda" else CPU_MAX_BATCHED_TOKENS
        seqs = s.config.scheduler.max_num_seqs or 1
        value = max(default, seqs)
        return [Decision("scheduler.max_num_batched_tokens", None, value, f"default on {s.device.kind}")]
    if not 1 <= asked <= MAX_BATCHED_TOKENS:
        raise ConfigError(f"--max-num-batched-tokens must be in 1..{MAX_BATCHED_TOKENS}, got {asked}.")
    return []


def _scheduled_tokens(s: _State) -> list[Decision]:
    asked, batched = s.config.scheduler.max_num_scheduled_tokens, s.config.scheduler.max_num_batched_tokens or 1
    if asked is None:
        return [Decision("scheduler.max_num_scheduled_tokens", None, batched, "as max_num_batched_tokens")]
    if not 1 <= asked <= batched:
        raise ConfigError(f"--max-num-scheduled-tokens must be in 1..{batched} (max_num_batched_tokens), got {asked}.")
    return []


def _threads(s: _State) -> list[Decision]:
    asked = s.config.device.num_threads
    if asked is None:
        return [Decision("device.num_threads", None, s.device.num_cores, "cores this process may use")]
    if asked < 1:
        raise ConfigError(f"--num-threads must be at least 1, got {asked}.")
    if asked > MAX_THREADS:
        raise ConfigError(f"--num-threads must be at most {MAX_THREADS}, got {asked}; {s.device.num_cores} fit here.")
    return []


def _async(s: _State) -> list[Decision]:
    if s.config.scheduler.async_scheduling is None:
        on = s.device.kind == "cuda"
        why = "hides scheduling behind the device" if on else "no gain on a CPU, where both share the cores"
        return [Decision("scheduler.async_scheduling", None, on, why)]
    return []


def _kv_memory(s: _State) -> list[Decision]:
    cache = s.config.cache
    if cache.num_kv_blocks is not None:
        if cache.num_kv_blocks < 1:
            raise ConfigError(f"--num-kv-blocks must be at least 1, got {cache.num_kv_blocks}.")
        return []
    if cache.kv_cache_memory is not None:
        if cache.kv_cache_memory < 1:
            raise ConfigError("--kv-cache-memory must be more than nothing; leave it out for what this machine has.")
        if cache.kv_cache_memory > s.device.memory_available_bytes:
            have = s.device.memory_available_bytes / 2**30
            raise ConfigError(
                f"--kv-cache-memory {cache.kv_cache_memory / 2**30:.2f} GiB is more than the {have:.2f} GiB "
                "available to this process; ask for less."
            )
        return []
    share = cache.gpu_memory_utilization
    if share is not None:
        if not 0 < share <= 1:
            raise ConfigError(f"--gpu-memory-utilization must be above 0 and at most 1, got {share}.")
        return []  # the budget follows from the weights, once they are there (engine.startup)
    if s.device.kind == "cpu":
        budget = int(s.device.memory_available_bytes * CPU_KV_SHARE)
        why = f"{CPU_KV_SHARE:.0%} of the {s.device.memory_available_bytes / 2**30:.1f} GiB available to this process"
        return [Decision("cache.kv_cache_memory", None, budget, why)]
    return [Decision("cache.gpu_memory_utilization", None, 0.9, f"default on {s.device.kind}")]


def _kv_events(s: _State) -> list[Decision]:
    if s.config.cache.kv_events and not s.config.cache.enable_prefix_caching:
        raise ConfigError(
            "--kv-events tells what the prefix cache holds, and --no-enable-prefix-caching keeps nothing in it: "
            "drop one of the two."
        )
    return []


def _block_size(s: _State) -> list[Decision]:
    size = s.config.cache.block_size
    if size is not None and not 1 <= size <= MAX_BLOCK_SIZE:
        raise ConfigError(f"--block-size must be in 1..{MAX_BLOCK_SIZE} tokens, got {size}.")
    return []


def _ranges(s: _State) -> list[Decision]:
    sched = s.config.scheduler
    if not 0 <= sched.kv_watermark < 1:
        raise ConfigError(f"--kv-watermark must be at least 0 and below 1, got {sched.kv_watermark}.")
    if sched.max_waiting_requests < 1:
        raise ConfigError(f"--max-waiting-requests must be at least 1, got {sched.max_waiting_requests}.")
    for name in ("priority_aging_s", "long_prefill_token_threshold"):
        if getattr(sched, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} must not be negative, got {getattr(sched, name)}.")
    return []


RULES: tuple[Rule, ...] = (
    _device, _quantization, _dtype, _max_model_len, _num_seqs, _batched_tokens, _scheduled_tokens, _threads, _async, _kv_memory, _kv_events, _block_size, _ranges,
)  # fmt: skip
