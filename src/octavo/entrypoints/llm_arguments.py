"""Arguments that people bring along from other engines' offline class.

Promises: one that changes nothing here is accepted, and said once to be not needed; one at a value that would mean
something is refused with what to do instead; None is as if it were not given.
Does not know: the options of this engine (see `config.schema`), which go on untouched.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from octavo.base.errors import ConfigError
from octavo.base.params import shown


class Foreign(NamedTuple):
    """An argument: which values change nothing, and why any other cannot be had, with the remedy."""

    harmless: Callable[[Any], bool]
    otherwise: str


def _any(_: Any) -> bool:
    return True


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(v) and value == v for v in values)


def _nothing(value: Any) -> bool:
    return not value


_ONE_DEVICE: Final = "an engine runs on one device; run several and put octavo route in front of them"
_SAME: Final = "the tokenizer is the one in the model's folder or file; put it there"

FOREIGN: Final[Mapping[str, Foreign]] = {
    "enforce_eager": Foreign(_any, ""),
    "swap_space": Foreign(_any, ""),
    "max_seq_len_to_capture": Foreign(_any, ""),
    "disable_custom_all_reduce": Foreign(_any, ""),
    "disable_async_output_proc": Foreign(_any, ""),
    "use_v2_block_manager": Foreign(_any, ""),
    "disable_log_stats": Foreign(_is(True), "the class logs no figures; LLM.stats() gives them"),
    "trust_remote_code": Foreign(_is(False), "code from a model's folder is never run; leave it out"),
    "tensor_parallel_size": Foreign(_is(1), _ONE_DEVICE),
    "pipeline_parallel_size": Foreign(_is(1), _ONE_DEVICE),
    "data_parallel_size": Foreign(_is(1), _ONE_DEVICE),
    "worker_use_ray": Foreign(_is(False), _ONE_DEVICE),
    "cpu_offload_gb": Foreign(_nothing, "weights stay on the device; take a smaller model or quantization"),
    "enable_chunked_prefill": Foreign(_is(True), "long prompts are always computed in pieces; raise max_num_batched_tokens for larger ones"),
    "preemption_mode": Foreign(_is("recompute"), "what is preempted is computed again, or comes back from where its KV went"),
    "tokenizer_mode": Foreign(_is("auto"), _SAME),
    "skip_tokenizer_init": Foreign(_is(False), "the tokenizer is always loaded"),
    "tokenizer": Foreign(_is(), _SAME),
    "tokenizer_revision": Foreign(_is(), _SAME),
    "task": Foreign(_is("auto", "generate"), "models generate text, and nothing else yet"),
    "runner": Foreign(_is("auto", "generate"), "models generate text, and nothing else yet"),
    "enable_lora": Foreign(_is(False), "adapters are not supported yet"),
    "enable_sleep_mode": Foreign(_is(False), "close() frees the memory, and a new LLM takes it again"),
    "hf_overrides": Foreign(_nothing, "change the model's config.json instead"),
    "limit_mm_per_prompt": Foreign(_nothing, "prompts are text only"),
}  # fmt: skip


def without_foreign(options: Mapping[str, Any], warn: Callable[[str], None]) -> dict[str, Any]:
    """The options that are ours, given by name; the harmless ones of others are told of in one sentence.

    Raises `ConfigError` for one at a value that would change something.
    """
    dropped = []
    for name, value in options.items():
        if (foreign := FOREIGN.get(name)) is None or value is None:
            continue
        if name == "tokenizer" and value == options.get("model"):
            continue
        if not foreign.harmless(value):
            raise ConfigError(f"{name}={shown(value)} is not possible: {foreign.otherwise}.")
        dropped.append(name)
    if dropped:
        warn(f"not needed here, and ignored: {', '.join(dropped)}")
    return {name: value for name, value in options.items() if name not in FOREIGN}
