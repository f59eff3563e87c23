"""Log-probabilities in OpenAI's two shapes, and where each token's text begins.

Promises: numbers are always finite JSON (-9999 stands for minus infinity, as in OpenAI's API); offsets
count characters of the text that is sent, also when one character is spread over several tokens.
Does not know: how log-probabilities were computed.
"""

import math
from collections.abc import Sequence
from typing import Any

from octavo.base.outputs import Logprob, TokenLogprobs
from octavo.entrypoints.http.wire import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, PromptScores, TopLogprob
from octavo.inputs.tokenizer import Tokenizer
from octavo.outputs.detokenizer import Detokenizer

FLOOR = -9999.0

PromptLines = Sequence[TokenLogprobs | None]  # one entry a prompt token; None for the first


def finite(value: float) -> float:
    """A log-probability as JSON can hold it."""
    return FLOOR if math.isnan(value) or value < FLOOR else value


def _text(entry: Logprob) -> str:
    return entry.decoded_token or ""


def _ranked(entries: TokenLogprobs) -> list[tuple[int, Logprob]]:
    return sorted(entries.items(), key=lambda item: -finite(item[1].logprob))


class Bytes:
    """The bytes of single tokens as JSON lists.

    Owns: a cache, at most one entry for each id of the vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, list[int]] = {}

    def of(self, token_id: int) -> list[int]:
        """One token's bytes, which need not be whole characters."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = list(self._tokenizer.token_bytes(token_id))
        return known


def chat_logprobs(lines: Sequence[TokenLogprobs], num_top: int, bytes_of: Bytes) -> ChatLogprobs:
    """One entry a token, with the `num_top` most likely candidates."""
    content = []
    for entries in lines:
        token_id, chosen = next(iter(entries.items()))
        top = [
            TopLogprob(_text(entry), finite(entry.logprob), bytes_of.of(each))
            for each, entry in (_ranked(entries)[:num_top] if num_top else ())
        ]
        content.append(ChatTokenLogprob(_text(chosen), finite(chosen.logprob), bytes_of.of(token_id), top))
    return ChatLogprobs(content)


class Offsets:
    """Where the text of each token begins, in characters of the text that the client gets.

    Owns: the position reached and the detokenizer's state.
    """

    def __init__(self, detokenizer: Detokenizer, *, start: int = 0, end: int | None = None) -> None:
        """The first token's text begins at `start`; below 0 and beyond `end` there is none of the client's text."""
        self._detokenizer = detokenizer
        self._position = start
        self._end = end

    def next(self, token_id: int) -> int:
        """The offset of this token; the position moves by the text it completes."""
        begin = max(0, self._position if self._end is None else min(self._position, self._end))
        self._position += len(self._detokenizer.step(token_id))
        return begin


def completion_logprobs(
    token_ids: Sequence[int],
    lines: Sequence[TokenLogprobs | None],
    num_top: int,
    *,
    offsets: Offsets,
    tokenizer: Tokenizer,
) -> CompletionLogprobs:
    """Parallel lists over `token_ids`; a line of None (the prompt's first token) gives nulls."""
    out = CompletionLogprobs([], [], [], [])
    for token_id, entries in zip(token_ids, lines, strict=True):
        out.text_offset.append(offsets.next(token_id))
        if not entries:
            out.tokens.append(tokenizer.token_text(token_id))
            out.token_logprobs.append(None)
            out.top_logprobs.append(None)
            continue
        chosen = entries[token_id]
        out.tokens.append(_text(chosen))
        out.token_logprobs.append(finite(chosen.logprob))
        top: dict[str, float] = {}
        for _, entry in _ranked(entries)[:num_top]:
            top.setdefault(_text(entry), finite(entry.logprob))
        top.setdefault(_text(chosen), finite(chosen.logprob))
        out.top_logprobs.append(top)
    return out


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """The prompt's entries followed by the answer's."""
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def prompt_scores(lines: Sequence[TokenLogprobs | None]) -> PromptScores:
    """The `prompt_logprobs` field: token id to its score, rank and text; null for the first token."""
    return [None if not line else {str(token): _score(entry) for token, entry in line.items()} for line in lines]


def _score(entry: Logprob) -> dict[str, Any]:
    return {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
