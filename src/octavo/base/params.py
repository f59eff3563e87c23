"""Sampling parameters: checked once when made, frozen after.

Promises: a `SamplingParams` that exists is valid on its own (ranges, types, combinations).
Does not know: the vocabulary or the context length; `inputs.limits` checks against those.
"""

import copy
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import msgspec

from octavo.base.errors import ClientError
from octavo.base.numbers import whole
from octavo.base.types import OutputKind

GREEDY_TEMPERATURE = 1e-5  # below this a row is greedy (OUT-2, step 10)
MAX_N = 128
MAX_SEED = 2**63 - 1
_INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
_TABLES = frozenset({"stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias", "detokenize"})
_FLAGS = (
    "ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
)  # fmt: skip


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request's tokens are chosen and when it ends.

    Names and defaults are those that users of OpenAI's API and of offline engines know.
    Raises `ClientError` with `param` set when a value is out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0  # 0: the most probable token
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16  # None: as many as the context allows
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None  # None: none; 0: the chosen token only; -1: the whole vocabulary
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: OutputKind = OutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        _normalize(self)
        _check(self)
        _check_tokens(self)

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_p == 0

    def replace(self, **changes: Any) -> "SamplingParams":
        """A copy with some fields changed, checked again; long lists only if they changed."""
        if not _TABLES.isdisjoint(changes):
            return msgspec.structs.replace(self, **changes)
        copied = copy.copy(self)
        for name, value in changes.items():
            if name not in SamplingParams.__struct_fields__:
                raise TypeError(f"SamplingParams has no field {name!r}")
            _set(copied, name, value)
        _normalize_numbers(copied)
        _check(copied)
        return copied


def _set(params: SamplingParams, name: str, value: object) -> None:
    msgspec.structs.force_setattr(params, name, value)


def _normalize(p: SamplingParams) -> None:
    """Accept the handy spellings (one stop string, lists, -1 for 'no limit') once, here."""
    stop: object = p.stop
    if stop is None:
        _set(p, "stop", ())
    elif isinstance(stop, str):
        _set(p, "stop", (stop,))
    else:
        _set(p, "stop", _as_tuple(stop, "stop"))
    for name in ("stop_token_ids", "bad_words"):
        value = getattr(p, name)
        _set(p, name, () if value is None else _as_tuple(value, name))
    if p.allowed_token_ids is not None:
        _set(p, "allowed_token_ids", _as_tuple(p.allowed_token_ids, "allowed_token_ids"))
    for name in ("stop_token_ids", "allowed_token_ids"):
        if any(type(token) is not int for token in getattr(p, name) or ()):
            _set(p, name, tuple(_token_id(name, token) for token in getattr(p, name)))
    _normalize_numbers(p)


def _normalize_numbers(p: SamplingParams) -> None:
    for name in _INTEGERS:
        if type(value := getattr(p, name)) is not int and value is not None:
            _set(p, name, _as_integer(name, value))
    if p.top_k == -1:
        _set(p, "top_k", 0)
    if p.seed == -1:
        _set(p, "seed", None)


def _as_tuple(value: Any, param: str) -> tuple[Any, ...]:
    if hasattr(value, "tolist"):  # an array of numbers
        value = value.tolist()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise ClientError(f"{param} must be a list, got {type(value).__name__}", param=param)
    return tuple(value)


def _as_integer(name: str, value: Any) -> int:
    """An integer of any kind, numpy's and whole floats included; true, 1.5 and "1" are none."""
    number = whole(value)
    if number is None:
        raise ClientError(f"{name} must be an integer, got {shown(value)}", param=name)
    return number


def _token_id(name: str, value: Any) -> int:
    try:
        return _as_integer(name, value)
    except ClientError:
        raise ClientError(f"{name} must hold integers, got {shown(value)}", param=name) from None


def shown(value: object, limit: int = 80) -> str:
    """A value for a message: at most `limit` characters, and also when Python refuses to write the number out."""
    try:
        text = repr(value)
    except ValueError:  # thousands of digits
        return "a very long number"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _is_number(value: Any) -> bool:
    """A real number of any kind, numpy's included, but NaN."""
    return not isinstance(value, bool) and isinstance(value, Real) and value == value


def _number(p: SamplingParams, name: str, low: float, high: float, *, open_low: bool = False) -> None:
    value: Any = getattr(p, name)
    if not _is_number(value):
        raise ClientError(f"{name} must be a number, got {shown(value)}", param=name)
    if value > high or value < low or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise ClientError(f"{name} must be in {bracket}{low:g}, {high:g}], got {shown(value)}", param=name)
    if not isinstance(value, float | int):
        _set(p, name, float(value))


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int):
        raise ClientError(f"{name} must be an integer, got {shown(value)}", param=name)
    if not low <= value <= high:
        raise ClientError(f"{name} must be in [{low}, {high}], got {shown(value)}", param=name)


def _check(p: SamplingParams) -> None:
    _integer("n", p.n, 1, MAX_N)
    _number(p, "temperature", 0.0, 100.0)
    _number(p, "top_p", 0.0, 1.0)
    _integer("top_k", p.top_k, 0, 2**31 - 1)
    _number(p, "min_p", 0.0, 1.0)
    _number(p, "presence_penalty", -2.0, 2.0)
    _number(p, "frequency_penalty", -2.0, 2.0)
    _number(p, "repetition_penalty", 0.0, 100.0, open_low=True)
    if p.seed is not None:
        _integer("seed", p.seed, -(2**63), MAX_SEED)
    for name in _FLAGS:
        if not isinstance(value := getattr(p, name), bool):
            raise ClientError(f"{name} must be true or false, got {shown(value)}", param=name)
    if not isinstance(p.output_kind, OutputKind):
        raise ClientError(f"output_kind must be an OutputKind, got {shown(p.output_kind)}", param="output_kind")
    _check_lengths(p)


def _check_lengths(p: SamplingParams) -> None:
    _integer("min_tokens", p.min_tokens, 0, 2**31 - 1)
    if p.max_tokens is not None:
        low = 0 if p.prompt_logprobs is not None else 1
        if p.max_tokens == 0 and low == 1:
            raise ClientError(
                "max_tokens must be at least 1 (0 is allowed with echo or prompt_logprobs)", param="max_tokens"
            )
        _integer("max_tokens", p.max_tokens, low, 2**31 - 1)
        if p.min_tokens > p.max_tokens:
            raise ClientError(
                f"min_tokens ({p.min_tokens}) must not exceed max_tokens ({p.max_tokens})", param="min_tokens"
            )
    for name in ("logprobs", "prompt_logprobs"):
        if (value := getattr(p, name)) is not None:
            _integer(name, value, -1, 2**31 - 1)


def _check_tokens(p: SamplingParams) -> None:
    for i, text in enumerate(p.stop):
        if not isinstance(text, str) or not text:
            raise ClientError(f"stop[{i}] must be a non-empty string, got {shown(text)}", param="stop")
    for i, text in enumerate(p.bad_words):
        if not isinstance(text, str) or not text:
            raise ClientError(f"bad_words[{i}] must be a non-empty string, got {shown(text)}", param="bad_words")
    if p.stop and not p.detokenize:
        raise ClientError("stop needs detokenize: without a text no stop string can be found in it", param="stop")
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        raise ClientError("allowed_token_ids must not be empty: no token could be chosen", param="allowed_token_ids")
    if p.logit_bias is not None:
        if not isinstance(p.logit_bias, Mapping):
            raise ClientError("logit_bias must be an object of token id to bias", param="logit_bias")
        _set(p, "logit_bias", {_bias_key(k): _bias_value(k, v) for k, v in p.logit_bias.items()} or None)


def _bias_key(key: Any) -> int:
    try:
        if isinstance(key, str):
            return int(key)
        return _as_integer("logit_bias", key)
    except (ClientError, ValueError):
        raise ClientError(f"logit_bias keys must be token ids, got {shown(key)}", param="logit_bias") from None


def _bias_value(key: object, value: Any) -> float:
    if not _is_number(value) or not -100 <= value <= 100:
        raise ClientError(f"logit_bias[{shown(key)}] must be in [-100, 100], got {shown(value)}", param="logit_bias")
    return float(value)
