"""One answer as it grows: ids in, text, log-probabilities and an end out.

Promises: text and token ids that leave together belong together: a token leaves with the piece of text that
completes its own text, so a token whose text is held back (half a character, the beginning of a stop
string) is held back with it, and its log-probabilities too; the last output carries all that is left, the
tokens of a stop string included, because they were generated.
Does not know: other answers of the same request, or when outputs are sent.

What the text contains: a stop string, an EOS or a stop token id ends the answer and is not part of the text
unless `include_stop_str_in_output` asks for it (a special token then still follows `skip_special_tokens`). Its
ids are always in `token_ids`, and `num_hidden` says how many of the last ones are no part of the text. Text of the first `min_tokens` tokens is never searched for stop strings.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from octavo.base.outputs import CompletionOutput, RequestDelta, RequestTimes, TokenLogprobs
from octavo.base.params import SamplingParams
from octavo.base.types import FinishReason
from octavo.outputs.detokenizer import Detokenizer, NoText, TextSource, TokenDecoder
from octavo.outputs.logprobs import LogprobReader
from octavo.outputs.stops import StopScanner


class StreamParser(Protocol):
    """Reads one answer as it is sent and says what it means (reasoning, tool calls); features implement it."""

    def feed(self, text: str, token_ids: Sequence[int], *, finished: bool) -> tuple[Any, ...]:
        """What the next piece of the answer adds; called once for each output, `finished` with the last."""


NOWHERE = 1 << 62  # where a token without text stands: behind every text

ParserFactory = Callable[[int], StreamParser]  # answer's index -> its parser


class NullParser:
    """Text is text.

    Owns: nothing.
    """

    def feed(self, text: str, token_ids: Sequence[int], *, finished: bool) -> tuple[Any, ...]:
        return ()


def no_parser(_: int) -> StreamParser:
    """The factory that stands where no parser is wanted."""
    return NullParser()


class AnswerRules(msgspec.Struct, frozen=True, kw_only=True):
    """What one answer does with its text: the part of `SamplingParams` that is not the engine's business."""

    stops: tuple[str, ...]
    include_stop: bool
    min_tokens: int
    detokenize: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    wants_logprobs: bool

    @classmethod
    def of(cls, params: SamplingParams) -> "AnswerRules":
        """The rules that a request's parameters state."""
        return cls(
            stops=params.stop if params.detokenize else (),
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            detokenize=params.detokenize,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            wants_logprobs=params.logprobs is not None,
        )

    def open_text(self, decoder: TokenDecoder, context: Sequence[int]) -> TextSource:
        """What turns this answer's ids into text."""
        if not self.detokenize:
            return NoText()
        return Detokenizer(
            decoder,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            context=context,
        )


class SampleState:
    """One of the `n` answers.

    Owns: everything in it.
    """

    __slots__ = (
        "_entries",
        "_include",
        "_min_tokens",
        "_num_chars",
        "_num_complete",
        "_num_free_chars",
        "_num_sent",
        "_parser",
        "_pieces",
        "_reader",
        "_scanner",
        "_sent_end",
        "_sent_text",
        "_spans",
        "_text",
        "_waiting",
        "cumulative_logprob",
        "error",
        "finish",
        "index",
        "last_output_s",
        "num_cached_tokens",
        "num_preemptions",
        "stop_reason",
        "times",
        "token_ids",
    )  # fmt: skip

    def __init__(
        self, index: int, rules: AnswerRules, text: TextSource, reader: LogprobReader, parser: StreamParser
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.cumulative_logprob = 0.0 if rules.wants_logprobs else None
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.times = RequestTimes()
        self.last_output_s = 0.0
        self._text = text
        self._scanner = StopScanner(rules.stops, include=rules.include_stop)
        self._include = rules.include_stop
        self._min_tokens = rules.min_tokens
        self._reader = reader
        self._parser = parser
        self._entries: list[TokenLogprobs] | None = [] if rules.wants_logprobs else None
        self._spans: list[
            tuple[int, int]
        ] = []  # of each token, where its text begins and ends; kept for log-probabilities
        self._pieces: list[str] = []  # text for the next output
        self._sent_text = ""  # text of earlier outputs, kept for whole() only
        self._num_chars = 0  # characters that came out of the detokenizer
        self._num_free_chars = 0  # of these, characters that no stop string holds back
        self._waiting: deque[int] = deque()  # by token that is not complete: the free characters that make it so
        self._num_complete = 0  # tokens whose text is free
        self._num_sent = 0  # tokens that earlier outputs carried
        self._sent_end = False

    def take(self, delta: RequestDelta) -> bool:
        """Add what one step brought; True when a stop string ended the answer, so the engine must be told."""
        self._take_facts(delta)
        ids = delta.new_token_ids
        if ids:
            self._take_tokens(ids, hide_last=delta.finish is FinishReason.STOP and not self._include)
            self._take_logprobs(delta)
        if self.finish is not None:
            return delta.finish is None
        if delta.finish is not None:
            self._end(delta.finish, delta.stop_reason)
        self._count_complete()
        return False

    def fail(self, message: str) -> None:
        """End the answer with an error of ours."""
        self.error = message
        self.finish = FinishReason.ERROR
        self._sent_end = False
        self._count_complete()

    def drop_parser(self) -> None:
        """Go on without the parser, which failed."""
        self._parser = NullParser()

    @property
    def has_news(self) -> bool:
        """True when an output would carry something that the last one did not."""
        if self.finish is not None:
            return not self._sent_end
        return bool(self._pieces) or self._num_sent < self._num_complete

    def delta(self) -> CompletionOutput:
        """What is new since the last output."""
        new = self._take_new()
        return self._output(new, new, self._num_sent)

    def whole(self) -> CompletionOutput:
        """The answer so far."""
        new = self._take_new()
        self._sent_text += new
        return self._output(self._sent_text, new, 0)

    def _take_new(self) -> str:
        new = "".join(self._pieces)
        self._pieces.clear()
        return new

    def _output(self, text: str, new_text: str, first_token: int) -> CompletionOutput:
        end = self._num_complete
        parts = self._parser.feed(new_text, self.token_ids[self._num_sent : end], finished=self.finish is not None)
        self._num_sent = end
        self._sent_end = self.finish is not None
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[first_token:end],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self._entries is None else self._entries[first_token:end],
            finish_reason=None if self.finish is None else self.finish.api_name,
            stop_reason=self.stop_reason,
            parts=parts,
            num_hidden=self._num_hidden() if self._spans and self.finish is not None else 0,
        )

    def _num_hidden(self) -> int:
        """How many of the last tokens ended the answer and have no text in it: EOS, a stop token, a stop string's."""
        free, count = self._num_free_chars, 0
        for begin, end in reversed(self._spans):
            if begin < free or end <= free:
                break
            count += 1
        return count

    def _take_facts(self, delta: RequestDelta) -> None:
        self.num_cached_tokens = delta.num_cached_tokens or self.num_cached_tokens
        self.num_preemptions = delta.num_preemptions or self.num_preemptions
        if delta.times is not None:
            self.times = delta.times
        if delta.error is not None:
            self.error = delta.error

    def _take_tokens(self, ids: Sequence[int], *, hide_last: bool) -> None:
        """Add ids up to the one that completes a stop string; the last one has no text when it only says 'stop'."""
        text, waiting = self._text, self._waiting
        hidden = len(ids) - 1 if hide_last else len(ids)
        for i, token_id in enumerate(ids):
            begin = self._num_chars
            self.token_ids.append(token_id)
            if i != hidden and (piece := text.step(token_id)):
                self._take_text(piece)
            if self._entries is not None:
                end = self._num_chars + 1 if text.holding else self._num_chars
                self._spans.append((NOWHERE, NOWHERE) if i == hidden else (begin, end))
            if self.finish is not None:
                return
            waiting.append(self._num_chars + 1 if text.holding else self._num_chars)

    def _take_text(self, text: str) -> None:
        self._num_chars += len(text)
        if len(self.token_ids) > self._min_tokens:
            text = self._scanner.feed(text)
            if self._scanner.matched is not None:
                self.finish, self.stop_reason = FinishReason.STOP, self._scanner.matched
        self._free(text)
        if self.finish is not None:
            self._count_complete()

    def _free(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._num_free_chars += len(text)

    def _take_logprobs(self, delta: RequestDelta) -> None:
        """One entry for each id that was taken; a stop string may have cut the ids."""
        if self._entries is None or self.cumulative_logprob is None:
            return
        first = len(self._entries)
        num_new = len(self.token_ids) - first
        entries: list[TokenLogprobs] = [{}] * num_new
        if delta.logprobs is not None:
            entries = self._reader.sampled(delta.logprobs, with_text=not isinstance(self._text, NoText))[:num_new]
        self._entries += entries
        for entry, token_id in zip(entries, self.token_ids[first:], strict=True):
            if (chosen := entry.get(token_id)) is not None:
                self.cumulative_logprob += chosen.logprob

    def _end(self, reason: FinishReason, stop_reason: int | None) -> None:
        """The engine ended it; a stop string that only the held text completes still wins."""
        if piece := self._text.flush():
            self._take_text(piece)
        if self.finish is None:
            self._free(self._scanner.flush())
            self.finish = reason
            self.stop_reason = reason.value if reason is FinishReason.REPETITION else stop_reason

    def _count_complete(self) -> None:
        if self.finish is not None or (not self._text.holding and not self._scanner.held):
            self._num_complete = len(self.token_ids)
            self._waiting.clear()
            return
        waiting, free = self._waiting, self._num_free_chars
        while waiting and waiting[0] <= free:
            waiting.popleft()
            self._num_complete += 1
