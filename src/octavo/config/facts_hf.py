"""Facts from a Hugging Face folder's own JSON files.

Promises: the meaning of every key is that of the model's reference code, defaults included, in the layouts of
transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`, `dtype`).
Does not know: how models are built, or weights.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from octavo.base.errors import LoadError
from octavo.base.safetensors import read_safetensors
from octavo.config.architectures import ARCHITECTURES, not_supported
from octavo.config.facts_base import ModelFacts, RopeFacts

# What the reference configurations assume for a key that config.json leaves out.
_COMMON_DEFAULTS: Final[Mapping[str, Any]] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    "qwen2": {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
}
_WINDOW_SWITCHED: Final = frozenset({"qwen2", "qwen3"})  # sliding_window counts only with use_sliding_window
_WINDOW_IGNORED: Final = frozenset({"llama"})  # the reference code does not look at sliding_window
_QKV_BIAS_ALWAYS: Final = frozenset({"qwen2"})
_QK_NORM: Final = frozenset({"qwen3"})
_SCALED_LENGTH: Final = frozenset({"linear", "yarn"})  # kinds whose factor stretches the context
_TRAINED_LENGTH: Final = frozenset({"yarn", "longrope", "llama3"})  # kinds that need the length before
_PARTIAL_IGNORED: Final = frozenset({"llama", "mistral", "qwen2", "qwen3"})  # the reference code turns whole heads
_ROPE_NUMBERS: Final = frozenset({
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim",
})  # fmt: skip
LARGEST_COUNT: Final = 2**31 - 1  # sizes and lengths beyond these are a damaged file, not a model
LARGEST: Final[Mapping[str, int]] = {"num_hidden_layers": 10_000}
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")
_SAMPLING: Final[Mapping[str, type]] = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float, "max_new_tokens": int,
}  # fmt: skip


def hf_facts(folder: Path, more: Callable[[], Collection[str]] = tuple) -> ModelFacts:
    """Facts of the folder; raises `LoadError` naming the architecture that is not supported, or a wrong key.

    `more` gives architectures beside the built-in ones; keys of one that nobody knows are not looked at.
    """
    raw = read_json(folder / "config.json")
    architecture = _architecture(folder / "config.json", raw, more)
    model_type = str(raw.get("model_type", ""))
    keys = _Keys(folder / "config.json", {**_COMMON_DEFAULTS, **_DEFAULTS.get(model_type, {}), **raw})
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    num_layers = keys.count("num_hidden_layers")
    if keys.values.get("head_dim") is None and hidden % heads:
        raise LoadError(f"{keys.file}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    rope = _rope(keys)
    bias = keys.flag("attention_bias")
    return ModelFacts(
        source=str(folder),
        format="hf",
        architecture=architecture,
        model_type=model_type,
        vocab_size=keys.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=keys.count("num_key_value_heads", heads),
        head_dim=keys.count("head_dim", hidden // heads),
        max_position=_max_position(keys, rope),
        dtype=_dtype(raw, folder),
        activation=str(raw.get("hidden_act") or raw.get("hidden_activation") or "silu"),
        norm_eps=keys.number("rms_norm_eps"),
        rope=rope,
        layer_windows=_windows(keys, model_type, num_layers),
        tie_embeddings=keys.flag("tie_word_embeddings"),
        attention_bias=bias or model_type in _QKV_BIAS_ALWAYS,
        attention_out_bias=bias and model_type not in _QKV_BIAS_ALWAYS,
        mlp_bias=keys.flag("mlp_bias"),
        qk_norm=model_type in _QK_NORM,
        bos_token_id=next(iter(token_ids(raw.get("bos_token_id"))), None),
        eos_token_ids=_checked_ids(folder / "config.json", raw.get("eos_token_id")),
        quantization=_quantization(keys),
        raw=raw,
    )


def _architecture(file: Path, raw: Mapping[str, Any], more: Callable[[], Collection[str]]) -> str:
    given = raw.get("architectures")
    if not isinstance(given, list) or not given or not isinstance(given[0], str):
        raise LoadError(f"{file} names no architecture; it needs 'architectures': [\"...\"]")
    name: str = given[0]
    if name not in ARCHITECTURES:
        known = (*ARCHITECTURES, *more())
        if name not in known:
            raise LoadError(f"{file}: the architecture {not_supported(name, known)}")
        return name
    for key in _EXPERTS:
        if isinstance(count := raw.get(key), int) and count > 1:
            raise LoadError(f"{file}: {key} is {count}, and mixture of experts is not supported for {name}")
    return name


def hf_generation_defaults(folder: Path, *, neutral: bool = False) -> tuple[tuple[int, ...], Mapping[str, Any]]:
    """EOS ids and sampling defaults of generation_config.json; empty without that file.

    Raises `LoadError` naming a value that is of a wrong type; with `neutral` only EOS ids are looked at.
    """
    file = folder / "generation_config.json"
    if not file.exists():
        return (), {}
    raw = read_json(file)
    eos = _checked_ids(file, raw.get("eos_token_id"))
    if neutral:
        return eos, {}
    said = {
        name: _sampling(file, name, raw[name], kind) for name, kind in _SAMPLING.items() if raw.get(name) is not None
    }
    limit = said.pop("max_new_tokens", None)
    samples = raw.get("do_sample")
    if samples is not None and not isinstance(samples, bool):
        raise LoadError(f"{file}: do_sample must be true or false, got {samples!r:.80}; mend that value or take it out")
    sampling = {} if samples is False else said  # an explicit False makes the reference code ignore these
    return eos, sampling if limit is None or limit <= 0 else sampling | {"max_tokens": limit}


def _sampling(file: Path, name: str, value: Any, kind: type) -> float:
    """A number of the right kind; a whole number may be written as 20.0."""
    if kind is float and (is_number(value) or isinstance(value, float)):
        return float(value)
    if kind is int and is_number(value) and value == int(value) and abs(value) <= LARGEST_COUNT:
        return int(value)
    what = "a number" if kind is float else f"a whole number up to {LARGEST_COUNT}"
    raise LoadError(f"{file}: {name} must be {what}, got {value!r:.80}; mend that value or take it out")


def _checked_ids(file: Path, value: object) -> tuple[int, ...]:
    many: Sequence[object] = value if isinstance(value, list) else [] if value is None else [value]
    ids = token_ids(value)
    if len(ids) != len(many):
        raise LoadError(f"{file}: eos_token_id must be a token id or a list of them, got {value!r:.80}")
    return ids


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file, or `LoadError`."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(f"{file} does not exist") from None
    except OSError as err:
        raise LoadError(f"{file} cannot be read: {err.strerror}") from None
    except RecursionError:
        raise LoadError(f"{file} is not valid JSON: it is nested too deeply") from None
    except ValueError as err:
        raise LoadError(f"{file} is not valid JSON (an interrupted download?): {err}") from None
    if not isinstance(value, dict):
        raise LoadError(f"{file} must hold a JSON object")
    return value


def token_ids(value: object) -> tuple[int, ...]:
    """Ids from a number, a list of numbers or nothing."""
    many: Sequence[object] = value if isinstance(value, list) else [value]
    return tuple(v for v in many if isinstance(v, int) and not isinstance(v, bool))


class _Keys:
    """Checked access to config.json's keys. A key that is null counts as missing."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self.file = file
        self.values = values

    def count(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise LoadError(f"{self.file} lacks {name!r}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LoadError(f"{self.file}: {name} must be a positive whole number, got {value!r:.80}")
        if value > LARGEST.get(name, LARGEST_COUNT):
            raise LoadError(f"{self.file}: {name} is {value!r:.80}, which no model has; the file is damaged")
        return value

    def number(self, name: str) -> float:
        value: Any = self.values.get(name)
        if not is_number(value):
            raise LoadError(f"{self.file}: {name} must be a number, got {value!r:.80}")
        return float(value)

    def flag(self, name: str) -> bool:
        return bool(self.values.get(name))


def is_number(value: object) -> bool:
    """A finite number that a float can hold."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _quantization(keys: _Keys) -> Mapping[str, Any] | None:
    for name in ("quantization_config", "compression_config"):
        if value := keys.values.get(name):
            if not isinstance(value, Mapping):
                raise LoadError(f"{keys.file}: {name} must be an object, got {value!r:.80}")
            return value
    return None


def _rope(keys: _Keys) -> RopeFacts:
    given = keys.values.get("rope_scaling") or keys.values.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise LoadError(f"{keys.file}: rope_parameters must be an object, got {given!r}")
    nested = [v for v in given.values() if isinstance(v, Mapping)]
    if nested:  # one entry for each kind of layer
        if any(v != nested[0] for v in nested):
            raise LoadError(f"{keys.file} has different rotary parameters by layer, which is not supported")
        given = nested[0]
    scaling = dict(given)
    kind = str(scaling.pop("rope_type", None) or scaling.get("type") or "default")
    scaling.pop("type", None)
    kind = {"su": "longrope", "mrope": "default"}.get(kind, kind)
    theta = _first(scaling.pop("rope_theta", None), keys.values.get("rope_theta"), 10000.0)
    partial = _first(scaling.pop("partial_rotary_factor", None), keys.values.get("partial_rotary_factor"), 1.0)
    if not is_number(theta) or not is_number(partial) or theta <= 0 or not 0 < partial <= 1:
        raise LoadError(
            f"{keys.file}: rope_theta must be above 0 and partial_rotary_factor in 0..1, got {theta!r:.40} and "
            f"{partial!r:.40}"
        )
    _add_lengths(keys, kind, scaling)
    _check_scaling(keys, scaling)
    return RopeFacts(theta=float(theta), kind=kind, partial=_partial(keys, kind, float(partial)), scaling=scaling)


def _add_lengths(keys: _Keys, kind: str, scaling: dict[str, Any]) -> None:
    """The length before scaling, and the factor between the lengths where only they are given."""
    if kind not in _TRAINED_LENGTH:
        return
    outside = keys.values.get("original_max_position_embeddings")  # wins where it is there (Phi 3)
    inside, declared = scaling.get("original_max_position_embeddings"), keys.count("max_position_embeddings")
    original = _first(outside, inside, declared)
    scaling["original_max_position_embeddings"] = original
    if kind != "llama3" and scaling.get("factor") is None and is_number(original) and original > 0:
        scaling["factor"] = declared / original


def _partial(keys: _Keys, kind: str, partial: float) -> float:
    """The share of a head that is turned, as the reference code of these models has it."""
    if partial == 1.0 or kind == "proportional" or keys.values.get("model_type") not in _PARTIAL_IGNORED:
        return partial
    if kind == "default":
        return 1.0
    raise LoadError(
        f"{keys.file}: partial_rotary_factor {partial:g} with rotary scaling {kind!r} is not supported for "
        f"{keys.values.get('model_type')} models, whose heads turn whole"
    )


def _check_scaling(keys: _Keys, scaling: Mapping[str, Any]) -> None:
    for name in ("short_factor", "long_factor"):
        if name in scaling and not (
            isinstance(scaling[name], list) and all(is_number(v) and v > 0 for v in scaling[name])
        ):
            raise LoadError(f"{keys.file}: {name} of the rotary embedding must be a list of numbers above 0")
    for name in _ROPE_NUMBERS & scaling.keys():
        value = scaling[name]
        if value is not None and (not is_number(value) or (name == "factor" and value <= 0)):
            raise LoadError(f"{keys.file}: {name} of the rotary embedding must be a number above 0, got {value!r:.80}")


def _first(*values: Any) -> Any:
    return next(v for v in values if v is not None)


def _max_position(keys: _Keys, rope: RopeFacts) -> int:
    """The declared length, or what the rotary scaling stretches the trained length to.

    Where the scaling changes as a sequence grows (`RopeFacts.grows`), the length up to which it does not.
    """
    declared, factor = keys.count("max_position_embeddings"), rope.scaling.get("factor")
    original = rope.scaling.get("original_max_position_embeddings", declared)
    if rope.kind == "longrope":
        return min(declared, int(original))
    if rope.kind not in _SCALED_LENGTH or not isinstance(factor, int | float):
        return declared
    return max(declared, int(original * factor))


def _windows(keys: _Keys, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    values, window = keys.values, keys.values.get("sliding_window")
    off = model_type in _WINDOW_IGNORED or (model_type in _WINDOW_SWITCHED and not values.get("use_sliding_window"))
    if off or window is None or values.get("use_sliding_window") is False:
        return (None,) * num_layers
    window = keys.count("sliding_window")
    kinds = values.get("layer_types")
    if kinds is None:
        first = (
            keys.count("max_window_layers") if values.get("max_window_layers") and model_type in _WINDOW_SWITCHED else 0
        )
        return tuple(window if i >= first else None for i in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise LoadError(f"{keys.file}: layer_types must list {num_layers} layers, as num_hidden_layers says")
    known = {"sliding_attention": window, "full_attention": None}
    for kind in kinds:
        if kind not in known:
            raise LoadError(f"{keys.file}: layers of type {kind!r} are not supported; known are {', '.join(known)}")
    return tuple(known[kind] for kind in kinds)


def _dtype(raw: Mapping[str, Any], folder: Path) -> str:
    named = raw.get("dtype") or raw.get("torch_dtype")
    if isinstance(named, str):
        return named.removeprefix("torch.")
    return _stored_dtype(folder) or "float32"


_SAFETENSORS_DTYPES: Final = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _stored_dtype(folder: Path) -> str | None:
    """The type of the first float tensor in the weights, from a safetensors header; None when there is none."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            kinds = [t.dtype for t in read_safetensors(path).tensors.values()]
        except LoadError:
            return None  # the loader says what is wrong with it
        for kind in kinds:
            if kind in _SAFETENSORS_DTYPES:
                return _SAFETENSORS_DTYPES[kind]
    return None
