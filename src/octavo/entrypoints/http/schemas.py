"""What clients may send: OpenAI's request shapes and the sampling fields users of such engines know.

Promises: types only, checked strictly; None means 'not given'. Ranges belong to `SamplingParams`,
vocabulary and length to `inputs.limits`, the meaning of messages to `inputs.chat`.
Does not know: what is done with a field.
"""

from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, create_model

from octavo.base.numbers import whole
from octavo.plugins import features

STRICT: Final = ConfigDict(strict=True, extra="allow", protected_namespaces=(), hide_input_in_errors=True)
PRIORITY_LIMIT: Final = 2**31 - 1

# Most entries of a field (F80). `fields` looks at these numbers before anything looks at the entries.
MOST_ENTRIES: Final = {
    "stop": 64,
    "stop_token_ids": 1024,
    "bad_words": 256,
    "allowed_token_ids": 16384,
    "logit_bias": 4096,
    "messages": 4096,
    "tools": 1024,
    "documents": 1024,
    "modalities": 16,
    "chat_template_kwargs": 256,
    "tokens": 262144,
    "stream_options": 32,
}


MOST_CHARS: Final = {"stop": 1024, "bad_words": 256}  # of each string

# How the schema says so; that there must be something in such a string, `SamplingParams` checks.
Stop = Annotated[str, WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MOST_CHARS["stop"]})]
BadWord = Annotated[str, WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MOST_CHARS["bad_words"]})]


def _as_whole(value: Any) -> Any:
    """Whole floats as integers; everything else as it is, for the type check to refuse."""
    return whole(value) if isinstance(value, float) and abs(value) <= _LARGEST and value.is_integer() else value


def _as_wholes(values: Any) -> Any:
    """Whole floats as integers, up to the first entry that is none: the check names that one, and makes no list of
    complaints about all that follow it (F80).
    """
    if not isinstance(values, list) or set(map(type, values)) <= {int}:
        return values
    out: list[Any] = []
    for value in values:
        out.append(_as_whole(value))
        if type(out[-1]) is not int:
            break
    return out


_LARGEST: Final = 2.0**63
Integer = Annotated[int, BeforeValidator(_as_whole)]
Tokens = Annotated[list[int], BeforeValidator(_as_wholes)]
Count = Annotated[Integer, Field(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(BaseModel):
    """How a stream reports usage."""

    model_config = STRICT

    include_usage: bool | None = Field(None, description="One more chunk with usage before the end.")
    continuous_usage_stats: bool | None = Field(None, description="Usage so far on every chunk too.")


# Fields of features (`Feature.request_field`), of those that are here.
FEATURE_FIELDS: Final = {f.request_field: f.request_help for f in features.present().values() if f.request_field}

if TYPE_CHECKING:

    class FeatureFields(BaseModel):
        """Fields that features read."""

else:
    FeatureFields = create_model(
        "FeatureFields",
        **{name: (dict[str, Any] | None, Field(None, description=text)) for name, text in FEATURE_FIELDS.items()},
    )


class GenerateRequest(FeatureFields):
    """Fields that completions and chat completions share."""

    model_config = STRICT

    model: str | None = Field(None, description="Served model; the only one when absent.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = Field(None, description="0 or -1: all tokens.")
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Count | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    stop: Stop | list[Stop] | None = None
    stop_token_ids: Tokens | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    bad_words: list[BadWord] | None = None
    allowed_token_ids: Tokens | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Token id to bias in -100..100.")
    prompt_logprobs: Count | None = Field(None, description="Scores of the prompt's tokens, this many beside each.")
    priority: Integer | None = Field(None, ge=-PRIORITY_LIMIT, le=PRIORITY_LIMIT, description="Lower is more urgent.")
    cache_salt: str | None = Field(None, min_length=1, max_length=1024, description="Prefixes are shared only within one salt.")  # fmt: skip
    request_id: str | None = Field(None, max_length=256, description="The client's own name of the request, for logs.")
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None

    # Accepted because OpenAI's clients send them; they change nothing here.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


class CompletionRequest(GenerateRequest):
    """`POST /v1/completions`. `prompt` is a text, token ids, or a list of either."""

    prompt: Any = Field(..., description="A string, a list of strings, token ids, or a list of lists of token ids.")
    best_of: Count | None = Field(None, description="Refused unless equal to n.")
    echo: bool | None = None
    logprobs: Count | None = None


class ChatRequest(GenerateRequest):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    max_completion_tokens: Count | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = Field(None, description="Only where the server allows it.")
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(None, description="Reaches the chat template.")
    modalities: list[str] | None = None
    verbosity: Any = None


class TokenizeRequest(BaseModel):
    """`POST /tokenize`: a prompt, or messages with the fields of a chat."""

    model_config = STRICT

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """`POST /detokenize`."""

    model_config = STRICT

    model: str | None = None
    tokens: Tokens
    skip_special_tokens: bool | None = None


class NotServed(NamedTuple):
    """What a known field would ask for, and the values (beside null) that ask for nothing: what is done anyway."""

    feature: str
    harmless: tuple[Any, ...] = ()


# Fields that other servers or OpenAI's newer interfaces have and this version does not serve: refused by
# name instead of being dropped in silence (INP-20), unless the value is what the server does anyway.
_FUNCTIONS: Final = "calling functions (deprecated by OpenAI)"
NOT_SERVED: Final[dict[str, NotServed]] = {
    "suffix": NotServed("inserting before a suffix", ("",)),
    "use_beam_search": NotServed("beam search", (False,)),
    "length_penalty": NotServed("beam search", (1.0,)),
    "early_stopping": NotServed("beam search", (False,)),
    "guided_json": NotServed("structured output"),
    "guided_regex": NotServed("structured output"),
    "guided_choice": NotServed("structured output"),
    "guided_grammar": NotServed("structured output"),
    "guided_decoding_backend": NotServed("structured output"),
    "structured_outputs": NotServed("structured output", ({},)),
    "structural_tag": NotServed("structured output"),
    "grammar": NotServed("structured output", ("",)),
    "json_schema": NotServed("structured output"),
    "regex": NotServed("structured output"),
    "logits_processors": NotServed("a custom logits processor", ([],)),
    "prompt_embeds": NotServed("a prompt of embeddings", ([],)),
    "truncate_prompt_tokens": NotServed("cutting the prompt"),
    "thinking_token_budget": NotServed("a thinking budget"),
    "functions": NotServed(_FUNCTIONS, ([],)),
    "function_call": NotServed(_FUNCTIONS, ("none", "auto")),
    "audio": NotServed("audio output"),
    "prediction": NotServed("a predicted output"),
    "web_search_options": NotServed("web search"),
    "mm_processor_kwargs": NotServed("media input", ({},)),
}
