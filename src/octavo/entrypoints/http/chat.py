"""`POST /v1/chat/completions`: messages in, the assistant's message out.

Promises: OpenAI's shapes, plain and streamed, from the same outputs; the role stands only in an index's
first delta and a finish reason only in its last.
Does not know: templates or tokens (`inputs.renderer` does).
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.base.outputs import CompletionOutput, RequestOutput
from octavo.entrypoints.http.checks import check_chat, request_warnings
from octavo.entrypoints.http.context import RouteContext
from octavo.entrypoints.http.feature_fields import response_fields
from octavo.entrypoints.http.fields import visible_warnings
from octavo.entrypoints.http.generate import ChunkHead, Indexed, PromptJob, UsageCount, make_jobs, serve
from octavo.entrypoints.http.logprobs import chat_logprobs, prompt_scores
from octavo.entrypoints.http.render import render_chat
from octavo.entrypoints.http.sampling import chat_params
from octavo.entrypoints.http.schemas import ChatRequest
from octavo.entrypoints.http.wire import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    PromptScores,
    Usage,
)
from octavo.http.sse import DONE, frame
from octavo.serving.intake import check_answers


class ChatRoute:
    """Owns: nothing; the door has the state."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context

    async def create(self, request: Request) -> Response:
        """Answer one chat request; raises what `errors.answer` turns into a status."""
        context = self._context
        req, warnings = await context.read(ChatRequest, request)
        model = context.model_name(req.model)
        check_chat(req)
        warnings += request_warnings(req, context.frontend.info)
        params = chat_params(req, context.frontend.info.default_sampling)
        check_answers(1, params.n, context.frontend.info.max_waiting_requests)

        async def prepare() -> "ChatReply":
            rendered = await render_chat(context, req)
            warnings.extend(rendered.warnings)
            (job,) = make_jobs(context, [rendered], params, req)
            head = ChunkHead.of(req, context, "chatcmpl", model, warnings)
            return ChatReply(head, job, req.top_logprobs or 0, context)

        return await serve(context, request, req, prepare, warnings)


class ChatReply:
    """One chat answer being told.

    Owns: which indexes have begun and ended, the warnings not told yet, and the usage so far.
    """

    def __init__(self, head: ChunkHead, job: PromptJob, num_top: int, context: RouteContext) -> None:
        self._head = head
        self._job = job
        self._num_top = num_top
        self._bytes_of = context.bytes_of
        self._special_ids = context.tokenizer.special_ids
        self._begun = [False] * job.params.n
        self._ended = [False] * job.params.n
        self._usage = UsageCount()
        self._unsent_warnings = head.warnings
        self._wants_ids = head.return_token_ids
        self._wants_scores = head.shows_prompt_logprobs

    def jobs(self) -> Sequence[PromptJob]:
        """The one prompt."""
        return (self._job,)

    def whole(self, finals: Sequence[RequestOutput]) -> ChatCompletion:
        """The plain answer."""
        out = finals[0]
        self._usage.note(0, out)
        return ChatCompletion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=[self._choice(each) for each in out.outputs],
            usage=self._usage.total(),
            **response_fields(finals, self._head.features),
            warnings=visible_warnings(self._head.warnings),
            prompt_token_ids=list(out.prompt_token_ids) if self._head.return_token_ids else UNSET,
            prompt_logprobs=prompt_scores(out.prompt_logprobs or []) if self._wants_scores else UNSET,
        )

    def _choice(self, each: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=each.index,
            message=ChatMessage("assistant", each.text),
            logprobs=self._logprobs(each),
            finish_reason=each.finish_reason or "stop",
            stop_reason=each.stop_reason,
            token_ids=list(each.token_ids) if self._head.return_token_ids else UNSET,
        )

    def _logprobs(self, each: CompletionOutput) -> ChatLogprobs | None:
        if self._job.params.logprobs is None or each.logprobs is None:
            return None
        lines = each.logprobs[: len(each.logprobs) - each.num_hidden]
        unseen = self._special_ids if self._job.params.skip_special_tokens else ()
        return chat_logprobs(lines, self._num_top, self._bytes_of, unseen)

    async def frames(self, outputs: AsyncIterator[Indexed]) -> AsyncGenerator[bytes, None]:
        """All events of the stream."""
        async for _, out in outputs:
            self._usage.note(0, out)
            if data := b"".join(frame(chunk) for chunk in self._chunks(out)):
                yield data
        if self._head.include_usage:
            yield frame(self._chunk([], usage=self._usage.total()))
        yield DONE

    def _chunks(self, out: RequestOutput) -> list[ChatChunk]:
        chunks = []
        for each in out.outputs:
            if self._ended[each.index]:
                continue
            if not self._begun[each.index]:
                self._begun[each.index] = True
                first = ChatChunkChoice(index=each.index, delta=ChatDelta(role="assistant", content=""))
                chunks.append(self._chunk([first], out))
            if self._has_news(each):
                self._ended[each.index] = each.finished
                chunks.append(self._chunk([self._delta(each)], out))
        return chunks

    def _has_news(self, each: CompletionOutput) -> bool:
        shown = each.text or each.finished or (each.logprobs and self._job.params.logprobs is not None)
        return bool(shown or (self._head.return_token_ids and each.token_ids))

    def _delta(self, each: CompletionOutput) -> ChatChunkChoice:
        logprobs = self._logprobs(each)
        if logprobs is not None and not logprobs.content:
            logprobs = None
        return ChatChunkChoice(
            index=each.index,
            delta=ChatDelta(content=each.text) if each.text or logprobs else ChatDelta(),
            logprobs=logprobs,
            finish_reason=each.finish_reason,
            stop_reason=each.stop_reason if each.finished else UNSET,
            token_ids=list(each.token_ids) if self._head.return_token_ids else UNSET,
        )

    def _chunk(
        self, choices: list[ChatChunkChoice], out: RequestOutput | None = None, usage: Usage | None = None
    ) -> ChatChunk:
        shown: Usage | UnsetType | None = UNSET
        if self._head.include_usage:
            shown = self._usage.total() if self._head.continuous_usage and choices else usage
        ids: list[int] | UnsetType = UNSET
        scores: PromptScores | UnsetType = UNSET
        ends = any(choice.finish_reason for choice in choices)
        if out is not None and self._wants_ids:
            ids, self._wants_ids = list(out.prompt_token_ids), False
        if out is not None and self._wants_scores and out.prompt_logprobs is not None:
            scores, self._wants_scores = prompt_scores(out.prompt_logprobs), False
        warnings, self._unsent_warnings = visible_warnings(self._unsent_warnings), ()
        return ChatChunk(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=choices,
            usage=shown,
            **(response_fields((out,), self._head.features) if out is not None and ends else {}),
            warnings=warnings,
            prompt_token_ids=ids,
            prompt_logprobs=scores,
        )
