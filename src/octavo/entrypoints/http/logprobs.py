"""Log-probabilities in OpenAI's two shapes, and where each token's text begins.

Promises: numbers are always finite JSON (-9999 stands for minus infinity, as in OpenAI's API); the tokens of a
completion, joined, are the text that is sent, and offsets count its characters, also when one character is spread over
several tokens.
Does not know: how log-probabilities were computed.
"""

import math
from collections.abc import Container, Sequence
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


def chat_logprobs(
    lines: Sequence[TokenLogprobs], num_top: int, bytes_of: Bytes, unseen: Container[int] = ()
) -> ChatLogprobs:
    """One entry a token, with the `num_top` most likely candidates; `unseen` ids have no text in the answer."""
    content = []
    for entries in lines:
        token_id, chosen = next(iter(entries.items()))
        top = [
            TopLogprob(_text(entry), finite(entry.logprob), bytes_of.of(each))
            for each, entry in (_ranked(entries)[:num_top] if num_top else ())
        ]
        text, raw = ("", []) if token_id in unseen else (_text(chosen), bytes_of.of(token_id))
        content.append(ChatTokenLogprob(text, finite(chosen.logprob), raw, top))
    return ChatLogprobs(content)


Piece = tuple[int, str]  # where a token's text begins, in characters, and the text


class Pieces:
    """The text of each token as it stands in the text that the client gets: joined, the pieces are that text.

    A character that is spread over several tokens is the last one's; the others have none.

    Owns: the position reached and the detokenizer's state.
    """

    def __init__(self, detokenizer: Detokenizer, *, start: int = 0) -> None:
        """The first token's text begins at `start`."""
        self._detokenizer = detokenizer
        self._position = start

    def of(self, token_ids: Sequence[int], *, last: bool = False, end: int | None = None) -> list[Piece]:
        """The pieces of the next tokens; with `last`, what is held back belongs to the last of them.

        Beyond `end` there is no text: a stop string may have cut the last token's.
        """
        pieces = []
        for token_id in token_ids:
            pieces.append((self._position, text := self._detokenizer.step(token_id)))
            self._position += len(text)
        if last and pieces and (rest := self._detokenizer.flush()):
            pieces[-1] = (pieces[-1][0], pieces[-1][1] + rest)
            self._position += len(rest)
        if end is None or self._position <= end:
            return pieces
        return [(min(begin, end), text[: max(0, end - begin)]) for begin, text in pieces]


def completion_logprobs(
    token_ids: Sequence[int], lines: Sequence[TokenLogprobs | None], num_top: int, pieces: Sequence[Piece]
) -> CompletionLogprobs:
    """Parallel lists over `token_ids`; a line of None (the prompt's first token) gives nulls."""
    out = CompletionLogprobs([], [], [], [])
    for token_id, entries, (begin, piece) in zip(token_ids, lines, pieces, strict=True):
        out.text_offset.append(begin)
        out.tokens.append(piece)
        if not entries:
            out.token_logprobs.append(None)
            out.top_logprobs.append(None)
            continue
        out.token_logprobs.append(finite(entries[token_id].logprob))
        out.top_logprobs.append(_top(token_id, entries, num_top, piece))
    return out


def _top(token_id: int, entries: TokenLogprobs, num_top: int, piece: str) -> dict[str, float]:
    """The most likely candidates by text, and the chosen one as it is called in `tokens`."""
    name = piece or _text(entries[token_id])
    top: dict[str, float] = {}
    for each, entry in _ranked(entries)[:num_top]:
        if each == token_id:
            top[name] = finite(entry.logprob)
        else:  # a rival that reads like the chosen token (but for a space at the start of the text) stays another
            text = _text(entry)
            top.setdefault(f"token_id:{each}" if text == name else text, finite(entry.logprob))
    top.setdefault(name, finite(entries[token_id].logprob))
    return top


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
