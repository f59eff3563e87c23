"""From request fields to `SamplingParams`, and the refusal of what this version does not serve.

Promises: a request's own values win over the model author's (INP-22), which win over neutral ones;
an error names the field as the client wrote it.
Does not know: the vocabulary or the context length (`inputs.limits` does).
"""

import re
from collections.abc import Mapping
from typing import Any

from octavo.base.errors import ClientError
from octavo.base.params import SamplingParams
from octavo.base.types import OutputKind
from octavo.entrypoints.http.schemas import ChatRequest, CompletionRequest, GenerateRequest
from octavo.http.errors import not_available

_COPIED = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "spaces_between_special_tokens", "bad_words", "allowed_token_ids",
)  # fmt: skip
_KNOWN = frozenset(SamplingParams.__struct_fields__)
_TOKEN_ID = re.compile(r"-?[0-9]{1,20}\Z")


def completion_params(req: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Parameters of a completion; 16 tokens when neither the request nor the defaults say.

    Raises `ClientError`.
    """
    check_common(req)
    if req.best_of is not None and req.best_of != (req.n or 1):
        raise ClientError(
            "best_of is not available in this version; leave it out or set it equal to n", param="best_of"
        )
    logprobs = _not_negative("logprobs", req.logprobs)
    prompt_logprobs = _not_negative("prompt_logprobs", req.prompt_logprobs)
    if req.echo and prompt_logprobs is None and (logprobs is not None or req.max_tokens == 0):
        prompt_logprobs = logprobs or 0  # echo shows the prompt's scores too (API-03)
    elif req.echo and logprobs is not None:
        prompt_logprobs = max(prompt_logprobs or 0, logprobs)
    return _build(req, defaults, {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs})


def chat_params(req: ChatRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Parameters of a chat; as many tokens as the context allows when nobody says.

    Raises `ClientError`.
    """
    check_common(req)
    values: dict[str, Any] = {
        "prompt_logprobs": _not_negative("prompt_logprobs", req.prompt_logprobs),
        "max_tokens": req.max_tokens,
    }
    if req.max_completion_tokens is not None:
        values["max_tokens"] = req.max_completion_tokens  # the newer name wins
    elif req.max_tokens is None:
        values["max_tokens"] = defaults.get("max_tokens")
    top = _not_negative("top_logprobs", req.top_logprobs)
    if top is not None and not req.logprobs and top > 0:
        raise ClientError("top_logprobs needs logprobs: true", param="top_logprobs")
    values["logprobs"] = (top or 0) if req.logprobs else None
    return _build(req, defaults, values)


def _build(req: GenerateRequest, defaults: Mapping[str, Any], values: dict[str, Any]) -> SamplingParams:
    merged = {name: value for name, value in defaults.items() if name in _KNOWN}
    for name in _COPIED:
        if (value := getattr(req, name)) is not None:
            merged[name] = value
    merged |= values
    merged["logit_bias"] = _bias(req.logit_bias) or merged.get("logit_bias")
    merged["output_kind"] = OutputKind.DELTA if req.stream else OutputKind.FINAL_ONLY
    try:
        return SamplingParams(**merged)
    except ClientError as error:
        raise renamed(error, limit_names(req)) from None


def renamed(error: ClientError, names: Mapping[str, str]) -> ClientError:
    """The same error with the field called as the client called it."""
    if error.param is None or error.param not in names:
        return error
    name = names[error.param]
    return ClientError(re.sub(rf"\b{error.param}\b", name, error.message), param=name, code=error.code)


def limit_names(req: GenerateRequest) -> dict[str, str]:
    """How this client calls `SamplingParams` fields, for errors of later checks."""
    names = {}
    if isinstance(req, ChatRequest):
        if req.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if req.top_logprobs is not None:
            names["logprobs"] = "top_logprobs"
    return names


def asks_max_tokens(req: GenerateRequest) -> bool:
    """True when the client said how long the answer may be; otherwise the number is ours and may be lowered."""
    return req.max_tokens is not None or (isinstance(req, ChatRequest) and req.max_completion_tokens is not None)


def _bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    for key in bias:
        if not _TOKEN_ID.match(key):
            raise ClientError(f"logit_bias keys must be token ids, got {key[:40]!r}", param="logit_bias")
    out: dict[int, float] = {}
    for key, value in bias.items():
        if int(key) in out:
            raise ClientError(f"logit_bias gives the token id {int(key)} twice", param="logit_bias")
        out[int(key)] = value
    return out


def _not_negative(name: str, value: int | None) -> int | None:
    if value is not None and value < 0:
        raise ClientError(f"{name} must be at least 0, got {value}", param=name)
    return value


def check_common(req: GenerateRequest) -> None:
    """Refuse combinations that cannot be served; raises `ClientError`."""
    options = req.stream_options
    if options is not None and not req.stream and (options.include_usage or options.continuous_usage_stats):
        raise ClientError("stream_options needs stream: true", param="stream_options")
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise ClientError(
            "stream_options.continuous_usage_stats needs stream_options.include_usage: true",
            param="stream_options.continuous_usage_stats",
        )
    _check_format(req.response_format)


def _check_format(given: dict[str, Any] | None) -> None:
    if given is None or given.get("type") == "text":
        return
    if "schema" in given and not isinstance(given.get("json_schema"), dict):
        raise ClientError(
            "response_format.schema is in the wrong place: a schema belongs in response_format.json_schema.schema "
            "(structured output itself is not available in this version)",
            param="response_format.schema",
            code="not_available",
        )
    kind = given.get("type")
    if kind in ("json_object", "json_schema", "structural_tag", "grammar", "regex"):
        raise not_available(f"response_format {kind!r}", param="response_format")
    raise ClientError("response_format.type must be 'text'", param="response_format.type")
