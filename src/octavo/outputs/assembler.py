"""From the engine's deltas to what people asked for, for every open request.

Promises: an output for each request that has news, in the kind it asked for (OUT-25); the `n` answers of a
prompt come back as one request; ids that are not open (finished by a stop string, closed, never known) are
dropped; an error while one answer is made into text ends that answer and no other.
Does not know: the event loop, the engine, or HTTP.

Kinds, when a request has news: DELTA carries the answers that have something new, and only that; CUMULATIVE
carries all answers as far as they are; FINAL_ONLY comes once, when the last answer has ended.
`prompt_logprobs` come with the first output that has answers, in DELTA; with every output otherwise.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.base.outputs import CompletionOutput, EngineOutputs, RequestDelta, RequestOutput, RequestTimes
from octavo.base.params import SamplingParams
from octavo.base.types import FinishReason, OutputKind
from octavo.observe.log import get_logger
from octavo.observe.stats import RequestRecord
from octavo.outputs.detokenizer import TokenDecoder
from octavo.outputs.logprobs import LogprobReader, PromptEntries
from octavo.outputs.sample_state import AnswerRules, NullParser, ParserFactory, SampleState, StreamParser, no_parser

__all__ = [
    "NullParser",
    "OutputAssembler",
    "ParserFactory",
    "Pushed",
    "RequestOpening",
    "StreamParser",
    "merge",
    "no_parser",
]

CONTEXT_TOKENS = 6  # ids before the answer that decoders may need to join it well

logger = get_logger(__name__)


class RequestOpening(msgspec.Struct, frozen=True, kw_only=True):
    """What the assembler must know of a request: its own id, its answers' ids by index, and what was asked."""

    parent_id: str
    request_ids: tuple[str, ...]
    params: SamplingParams
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    arrived_s: float = 0.0
    parsers: ParserFactory = no_parser


class Pushed(msgspec.Struct, kw_only=True):
    """What one batch of deltas led to.

    `aborts` are ids that the engine must stop: a stop string, or an error here, ended them. `gaps_s` are the
    times between successive outputs of answers, `ended` the answers that came to an end.
    """

    outputs: list[RequestOutput]
    aborts: list[str]
    gaps_s: list[float]
    ended: list[RequestRecord]


class _Entry:
    """One open request.

    Owns: its answers and its prompt's log-probabilities.
    """

    __slots__ = (
        "answered",
        "answers",
        "cached_by_source",
        "num_open",
        "opening",
        "parts",
        "prompt_entries",
        "prompt_ids",
    )

    def __init__(self, opening: RequestOpening, answers: list[SampleState]) -> None:
        self.opening = opening
        self.answers = answers
        self.num_open = len(answers)
        self.cached_by_source: dict[str, int] | None = None
        self.parts: list[Any] = []
        wants = opening.params.prompt_logprobs is not None
        self.prompt_entries = PromptEntries(len(opening.prompt_token_ids)) if wants else None
        self.prompt_ids = list(opening.prompt_token_ids)  # shared by all outputs
        self.answered = False  # some output has left

    def news(self) -> RequestOutput | None:
        """The next output, if this request's kind has one now."""
        kind = self.opening.params.output_kind
        if kind is OutputKind.FINAL_ONLY:
            return None if self.num_open else self._output([a.whole() for a in self.answers])
        fresh = [a for a in self.answers if a.has_news]
        if not fresh:
            return None
        if kind is OutputKind.CUMULATIVE:
            return self._output([a.whole() for a in self.answers])
        return self._output([a.delta() for a in fresh])

    def _output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        opening, answers = self.opening, self.answers
        delta = opening.params.output_kind is OutputKind.DELTA
        entries = None if self.prompt_entries is None or (delta and self.answered) else self.prompt_entries.entries
        parts = tuple(self.parts)
        if delta:
            self.parts = []
        self.answered = True
        return RequestOutput(
            request_id=opening.parent_id,
            prompt=opening.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=outputs,
            finished=self.num_open == 0,
            prompt_logprobs=entries,
            num_cached_tokens=answers[0].num_cached_tokens,
            num_output_tokens=sum(len(a.token_ids) for a in answers),
            cached_by_source=self.cached_by_source,
            num_preemptions=sum(a.num_preemptions for a in answers),
            times=_joint([a.times for a in answers]),
            error=next((a.error for a in answers if a.error is not None), None),
            parts=parts,
        )


class OutputAssembler:
    """All open requests of one front.

    `context_tokens` ids before the answer are shown to its detokenizer, so that text after a prompt begins as
    the tokenizer would continue it (0: every answer is decoded as if it were a text of its own).

    Owns: the open requests. One thread uses it.
    """

    def __init__(self, decoder: TokenDecoder, *, context_tokens: int = CONTEXT_TOKENS) -> None:
        self._decoder = decoder
        self._context_tokens = context_tokens
        self._reader = LogprobReader(decoder)
        self._entries: dict[str, _Entry] = {}  # by parent id
        self._answers: dict[str, tuple[_Entry, SampleState]] = {}  # by answer's id, while the answer goes on

    def __len__(self) -> int:
        """Open requests."""
        return len(self._entries)

    def open(self, opening: RequestOpening) -> None:
        """Expect deltas for the request's answers. Its ids must be new."""
        rules = AnswerRules.of(opening.params)
        context = opening.prompt_token_ids[-self._context_tokens :] if self._context_tokens else ()
        answers = [
            SampleState(i, rules, rules.open_text(self._decoder, context), self._reader, opening.parsers(i))
            for i in range(len(opening.request_ids))
        ]
        entry = _Entry(opening, answers)
        self._entries[opening.parent_id] = entry
        for request_id, answer in zip(opening.request_ids, answers, strict=True):
            self._answers[request_id] = (entry, answer)

    def close(self, parent_id: str, now_s: float) -> tuple[tuple[str, ...], list[RequestRecord]]:
        """Forget a request whose reader is gone.

        Gives the ids of answers that had not ended, which the engine must stop, and their records.
        """
        entry = self._entries.pop(parent_id, None)
        if entry is None:
            return (), []
        aborts, records = [], []
        for request_id, answer in zip(entry.opening.request_ids, entry.answers, strict=True):
            if self._answers.pop(request_id, None) is not None:
                aborts.append(request_id)
                answer.finish = FinishReason.ABORT
                records.append(_record(entry, answer, now_s))
        return tuple(aborts), records

    def open_ids(self) -> tuple[str, ...]:
        """Ids of all answers that have not ended."""
        return tuple(self._answers)

    def push(self, outputs: EngineOutputs, now_s: float = 0.0) -> Pushed:
        """Take one batch of deltas; at most one output comes back for each request."""
        pushed = Pushed(outputs=[], aborts=[], gaps_s=[], ended=[])
        touched: dict[str, _Entry] = {}
        answers = self._answers
        for delta in outputs.deltas:
            if (found := answers.get(delta.request_id)) is None:
                continue
            entry, answer = found
            touched[entry.opening.parent_id] = entry
            if delta.new_token_ids:
                if answer.last_output_s:
                    pushed.gaps_s.append(now_s - answer.last_output_s)
                answer.last_output_s = now_s
            self._take(entry, answer, delta, pushed)
            if answer.finish is not None:
                del answers[delta.request_id]
                entry.num_open -= 1
                pushed.ended.append(_record(entry, answer, now_s))
        for parent_id, entry in touched.items():
            self._tell(parent_id, entry, pushed, now_s)
        return pushed

    def _take(self, entry: _Entry, answer: SampleState, delta: RequestDelta, pushed: Pushed) -> None:
        """One delta into one answer; whatever goes wrong stays in this answer."""
        try:
            if delta.prompt_logprobs and entry.prompt_entries is not None:
                for lines in delta.prompt_logprobs:
                    with_text = entry.opening.params.detokenize
                    entry.prompt_entries.place(lines.start, self._reader.prompt(lines, with_text=with_text))
            if delta.cached_by_source is not None and answer.index == 0:
                entry.cached_by_source = delta.cached_by_source
            if delta.parts:
                entry.parts.extend(delta.parts)
            if answer.take(delta):
                pushed.aborts.append(delta.request_id)
        except Exception:
            logger.exception("request %s: its output could not be made into text", delta.request_id)
            answer.fail("the answer could not be made into text; this request ends here, others go on")
            if delta.finish is None:
                pushed.aborts.append(delta.request_id)

    def _tell(self, parent_id: str, entry: _Entry, pushed: Pushed, now_s: float) -> None:
        """The request's next output, if it has one."""
        try:
            output = entry.news()
        except Exception:
            logger.exception("request %s: a parser failed", parent_id)
            output = self._failed(entry, pushed, now_s)
        if output is not None:
            pushed.outputs.append(output)
        if entry.num_open == 0:
            self._entries.pop(parent_id, None)

    def _failed(self, entry: _Entry, pushed: Pushed, now_s: float) -> RequestOutput | None:
        """End all answers of a request whose output cannot be made."""
        for request_id, answer in zip(entry.opening.request_ids, entry.answers, strict=True):
            alive = self._answers.pop(request_id, None) is not None
            answer.fail("the answer could not be parsed; this request ends here, others go on")
            answer.drop_parser()
            if alive:
                pushed.aborts.append(request_id)
                pushed.ended.append(_record(entry, answer, now_s))
        entry.num_open = 0
        return entry.news()


def _record(entry: _Entry, answer: SampleState, now_s: float) -> RequestRecord:
    """The answer's figures. Its end is ours to tell when the engine did not end it (a stop string, a reader gone)."""
    times = answer.times
    changes = {"arrived_s": times.arrived_s or entry.opening.arrived_s, "finished_s": times.finished_s or now_s}
    answer.times = msgspec.structs.replace(times, **changes)
    return RequestRecord(
        reason=answer.finish or FinishReason.ABORT,
        times=answer.times,
        output_tokens=len(answer.token_ids),
        prompt_tokens=len(entry.prompt_ids) if answer.index == 0 else None,
    )


def _joint(times: Sequence[RequestTimes]) -> RequestTimes:
    """The moments of several answers as one request's: the first of everything, and the last end."""
    if len(times) == 1:
        return times[0]
    names = ("arrived_s", "queued_s", "scheduled_s", "first_token_s")
    earliest = {name: min((v for t in times if (v := getattr(t, name))), default=0.0) for name in names}
    ended = all(t.finished_s for t in times)
    return RequestTimes(**earliest, finished_s=max(t.finished_s for t in times) if ended else 0.0)


def merge(old: RequestOutput, new: RequestOutput, kind: OutputKind) -> RequestOutput:
    """Two successive outputs of one request as one, for a reader that is slower than the engine."""
    earlier = {o.index: o for o in old.outputs}
    for output in new.outputs:
        if (first := earlier.pop(output.index, None)) is None:
            continue
        output.parts = first.parts + output.parts
        if kind is OutputKind.DELTA:
            _prepend(first, output)
    if kind is OutputKind.DELTA:
        new.outputs = sorted([*earlier.values(), *new.outputs], key=lambda o: o.index)
        new.prompt_logprobs = new.prompt_logprobs or old.prompt_logprobs
        new.parts = old.parts + new.parts
    return new


def _prepend(first: CompletionOutput, second: CompletionOutput) -> None:
    second.text = first.text + second.text
    second.token_ids = first.token_ids + second.token_ids
    if first.logprobs is not None and second.logprobs is not None:
        second.logprobs = first.logprobs + second.logprobs
