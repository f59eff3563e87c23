"""What the server sends: OpenAI's answer and chunk shapes as frozen structs.

Promises: field order and nulls as clients validate them (STR-07); encoding is one msgspec call and
touches no pydantic. A field that was not asked for is absent (`UNSET`), not null.
Does not know: where values come from.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from octavo.base.types import Medium
from octavo.entrypoints.http.schemas import FEATURE_FIELDS

PromptScores = list[dict[str, Any] | None]

if TYPE_CHECKING:

    class FeatureAnswer(msgspec.Struct, frozen=True, kw_only=True):
        """What features add to an answer."""

else:
    FeatureAnswer = msgspec.defstruct(
        "FeatureAnswer",
        [(name, dict[str, Any] | UnsetType, UNSET) for name in FEATURE_FIELDS],
        frozen=True,
        kw_only=True,
    )


class PromptDetails(msgspec.Struct, frozen=True):
    """How many prompt tokens came from the prefix cache; and from where, when some came from beyond the device."""

    cached_tokens: int = 0
    cached_tokens_by_source: dict[str, int] | UnsetType = UNSET


class Usage(msgspec.Struct, frozen=True):
    """Tokens that were used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


def make_usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, sources: Mapping[str, int] | None = None
) -> Usage:
    """Usage whose total is the sum. `sources`: cached tokens by where they came from."""
    total = prompt_tokens + completion_tokens
    beyond = any(name != Medium.DEVICE for name in sources or ())
    details = PromptDetails(cached_tokens, dict(sources or {}) if beyond else UNSET)
    return Usage(prompt_tokens, completion_tokens, total, details)


# ---- completions ----------------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """OpenAI's completions shape: parallel lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, or one answer's share in a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptScores | UnsetType = UNSET


class Completion(FeatureAnswer, frozen=True, kw_only=True):
    """A plain answer, and a chunk of a stream: OpenAI names both `text_completion`."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    warnings: list[str] | UnsetType = UNSET  # in a stream: its first chunk


# ---- chat -----------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct, frozen=True):
    """One candidate; `bytes` need not be whole characters."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """The chosen token and its rivals."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a chat answer."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """The assistant's whole message."""

    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One whole answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(FeatureAnswer, frozen=True, kw_only=True):
    """A plain chat answer."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    warnings: list[str] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptScores | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to the message; the role only in an index's first."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer's share in a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(FeatureAnswer, frozen=True, kw_only=True):
    """One chunk of a chat stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    warnings: list[str] | UnsetType = UNSET  # in a stream: its first chunk
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptScores | UnsetType = UNSET
