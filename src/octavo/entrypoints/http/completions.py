"""`POST /v1/completions`: prompts in, continuations out; with `echo` also the prompts and their scores.

Promises: OpenAI's shapes, plain and streamed, from the same outputs; choice `p * n + i` is answer i to
prompt p; with `echo` the first chunk of a choice is the prompt with its scores (API-03, LOG-02).
Does not know: tokens or templates (`inputs.renderer` does).
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.base.outputs import CompletionOutput, RequestOutput
from octavo.base.params import SamplingParams
from octavo.entrypoints.http.checks import request_warnings
from octavo.entrypoints.http.context import RouteContext
from octavo.entrypoints.http.feature_fields import response_fields
from octavo.entrypoints.http.fields import visible_warnings
from octavo.entrypoints.http.generate import ChunkHead, Indexed, PromptJob, UsageCount, amake_jobs, serve
from octavo.entrypoints.http.logprobs import Piece, Pieces, PromptLines, completion_logprobs, joined, prompt_scores
from octavo.entrypoints.http.prompts import split_prompts
from octavo.entrypoints.http.render import render_prompts
from octavo.entrypoints.http.sampling import completion_params
from octavo.entrypoints.http.schemas import CompletionRequest
from octavo.entrypoints.http.wire import Completion, CompletionChoice, CompletionLogprobs, PromptScores, Usage
from octavo.http.sse import DONE, frame
from octavo.inputs.tokenizer import Tokenizer
from octavo.outputs.detokenizer import Detokenizer
from octavo.serving.intake import check_answers

CONTEXT_TOKENS = 6  # prompt ids that let a decoder join prompt and answer well


class CompletionRoute:
    """Owns: nothing; the door has the state."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context

    async def create(self, request: Request) -> Response:
        """Answer one completion request; raises what `errors.answer` turns into a status."""
        context = self._context
        req, warnings = await context.read(CompletionRequest, request)
        model = context.model_name(req.model)
        warnings += request_warnings(req, context.frontend.info)
        params = completion_params(req, context.frontend.info.default_sampling)
        prompts = split_prompts(
            req.prompt, lambda num: check_answers(num, params.n, context.frontend.info.max_waiting_requests)
        )

        async def prepare() -> "CompletionReply":
            jobs = await amake_jobs(
                context, await render_prompts(context, prompts, req.add_special_tokens), params, req
            )
            echoes = [Echo(False)] * len(jobs)
            if req.echo:
                echoes = await asyncio.to_thread(echoed, jobs, req, context.tokenizer)
            head = ChunkHead.of(req, context, "cmpl", model, warnings)
            return CompletionReply(head, jobs, echoes, req.logprobs, context.tokenizer)

        return await serve(context, request, req, prepare, warnings)


def echoed(jobs: Sequence[PromptJob], req: CompletionRequest, tokenizer: Tokenizer) -> list["Echo"]:
    """What comes before each prompt's answers."""
    return [Echo.of(job, req, tokenizer) for job in jobs]


class Echo:
    """The prompt as the answer's first part, or nothing when it was not asked for.

    A prompt of text comes back as the client wrote it; one of token ids as all their text, special tokens included.

    Owns: nothing after it is made.
    """

    __slots__ = ("num_top", "pieces", "text", "wanted")

    def __init__(self, wanted: bool, text: str = "", num_top: int | None = None, pieces: Sequence[Piece] = ()) -> None:
        self.wanted = wanted
        self.text = text
        self.num_top = num_top  # None: without scores
        self.pieces = pieces

    @classmethod
    def of(cls, job: PromptJob, req: CompletionRequest, tokenizer: Tokenizer) -> "Echo":
        """What this request echoes of one prompt. Takes a while for a long one."""
        ids, text, shown = job.input.prompt_token_ids, job.input.prompt, job.params.replace(skip_special_tokens=False)
        if req.logprobs is None:
            return cls(True, tokenizer.decode(ids, skip_special_tokens=False) if text is None else text)
        added = 0  # a BOS that the client did not write has no text in the echo
        bos = tokenizer.bos_token_id
        if text is not None and bos is not None and ids[:1] == (bos,):
            added = int(not text.startswith(tokenizer.token_text(bos)))
        pieces = [(0, "")] * added + Pieces(_detokenizer(shown, tokenizer, ())).of(ids[added:], last=True)
        return cls(True, "".join(piece for _, piece in pieces) if text is None else text, req.logprobs, pieces)

    def logprobs(self, job: PromptJob, scores: PromptLines | None) -> CompletionLogprobs | None:
        """The prompt's scores in the completions shape, if they were asked for; offsets are in the echoed text."""
        if self.num_top is None or scores is None:
            return None
        return completion_logprobs(job.input.prompt_token_ids, scores, self.num_top, self.pieces)


def _detokenizer(params: SamplingParams, tokenizer: Tokenizer, context: Sequence[int]) -> Detokenizer:
    return Detokenizer(
        tokenizer,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        context=context,
    )


class CompletionReply:
    """The answers to all prompts of one request being told.

    Owns: which choices have begun and ended, where their texts stand, the prompts' scores, the warnings not told yet,
    and the usage so far.
    """

    def __init__(
        self,
        head: ChunkHead,
        jobs: Sequence[PromptJob],
        echoes: Sequence[Echo],
        num_top: int | None,
        tokenizer: Tokenizer,
    ) -> None:
        self._head = head
        self._jobs = jobs
        self._echoes = echoes
        self._num_top = num_top
        self._tokenizer = tokenizer
        self._n = jobs[0].params.n
        self._begun = [False] * (self._n * len(jobs))
        self._ended = [False] * (self._n * len(jobs))
        self._pieces: dict[int, Pieces] = {}
        self._num_chars: dict[int, int] = {}  # of each choice that has scores, the text told so far
        self._scores: dict[int, PromptLines] = {}  # of each prompt; a stream's first output alone brings them
        self._usage = UsageCount()
        self._unsent_warnings = head.warnings

    def jobs(self) -> Sequence[PromptJob]:
        """All prompts, in the order sent."""
        return self._jobs

    def whole(self, finals: Sequence[RequestOutput]) -> Completion:
        """The plain answer."""
        choices = []
        for place, out in enumerate(finals):
            self._usage.note(place, out)
            choices += [self._whole_choice(place, out, each) for each in out.outputs]
        return self._completion(choices, self._usage.total(), response_fields(finals, self._head.features))

    def _whole_choice(self, place: int, out: RequestOutput, each: CompletionOutput) -> CompletionChoice:
        echo = self._echoes[place]
        first = self._first(place, out, each.index)
        rest = self._choice(place, out, each)
        scores = rest.logprobs
        if scores is None and self._num_top is not None:
            scores = CompletionLogprobs([], [], [], [])
        if first.logprobs is not None and scores is not None:
            scores = joined(first.logprobs, scores)
        return CompletionChoice(
            index=rest.index,
            text=echo.text + each.text,
            logprobs=first.logprobs if scores is None else scores,
            finish_reason=each.finish_reason or "stop",
            stop_reason=each.stop_reason,
            token_ids=rest.token_ids,
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=first.prompt_logprobs,
        )

    def _first(self, place: int, out: RequestOutput, index: int) -> CompletionChoice:
        """What comes before the answer: the echoed prompt, its ids and scores."""
        echo = self._echoes[place]
        if out.prompt_logprobs is not None:
            self._scores[place] = out.prompt_logprobs
        lines = self._scores.get(place)
        scores: PromptScores | UnsetType = UNSET
        if self._head.shows_prompt_logprobs and lines is not None:
            scores = prompt_scores(lines)
        return CompletionChoice(
            index=place * self._n + index,
            text=echo.text,
            logprobs=echo.logprobs(self._jobs[place], lines),
            prompt_token_ids=list(out.prompt_token_ids) if self._head.return_token_ids else UNSET,
            prompt_logprobs=scores,
        )

    def _choice(self, place: int, out: RequestOutput, each: CompletionOutput) -> CompletionChoice:
        index = place * self._n + each.index
        return CompletionChoice(
            index=index,
            text=each.text,
            logprobs=self._logprobs(place, out, each, index),
            finish_reason=each.finish_reason,
            stop_reason=each.stop_reason,
            token_ids=list(each.token_ids) if self._head.return_token_ids else UNSET,
        )

    def _logprobs(
        self, place: int, out: RequestOutput, each: CompletionOutput, index: int
    ) -> CompletionLogprobs | None:
        if self._num_top is None or each.logprobs is None:
            return None
        start = len(self._echoes[place].text)
        if index not in self._pieces:
            detokenizer = _detokenizer(
                self._jobs[place].params, self._tokenizer, out.prompt_token_ids[-CONTEXT_TOKENS:]
            )
            self._pieces[index] = Pieces(detokenizer, start=start)
        num_chars = self._num_chars[index] = self._num_chars.get(index, start) + len(each.text)
        ids, lines = each.token_ids, each.logprobs
        if each.num_hidden:
            ids, lines = ids[: -each.num_hidden], lines[: -each.num_hidden]
        if not ids:
            return None
        pieces = self._pieces[index].of(ids, last=each.finished, end=num_chars if each.finished else None)
        return completion_logprobs(ids, lines, self._num_top, pieces)

    async def frames(self, outputs: AsyncIterator[Indexed]) -> AsyncGenerator[bytes, None]:
        """All events of the stream."""
        async for place, out in outputs:
            self._usage.note(place, out)
            added = response_fields((out,), self._head.features)
            if data := b"".join(frame(self._chunk(choice, added)) for choice in self._news(place, out)):
                yield data
        if self._head.include_usage:
            yield frame(self._completion([], self._usage.total()))
        yield DONE

    def _news(self, place: int, out: RequestOutput) -> list[CompletionChoice]:
        choices = []
        for each in out.outputs:
            index = place * self._n + each.index
            if self._ended[index]:
                continue
            if not self._begun[index]:
                self._begun[index] = True
                if self._echoes[place].wanted or self._head.shows_prompt_logprobs or self._head.return_token_ids:
                    choices.append(self._first(place, out, each.index))
            if self._has_news(each):
                self._ended[index] = each.finished
                choices.append(self._choice(place, out, each))
        return choices

    def _has_news(self, each: CompletionOutput) -> bool:
        shown = each.text or each.finished or (each.logprobs and self._num_top is not None)
        return bool(shown or (self._head.return_token_ids and each.token_ids))

    def _chunk(self, choice: CompletionChoice, added: dict[str, Any]) -> Completion:
        shown: Usage | UnsetType | None = UNSET
        if self._head.include_usage:
            shown = self._usage.total() if self._head.continuous_usage else None
        return self._completion([choice], shown, added if choice.finish_reason else None)

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None, added: dict[str, Any] | None = None
    ) -> Completion:
        warnings, self._unsent_warnings = visible_warnings(self._unsent_warnings), ()
        return Completion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=choices,
            usage=usage,
            warnings=warnings,
            **(added or {}),
        )
