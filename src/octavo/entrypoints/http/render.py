"""Prompts as the model will see them: shared by generation, tokenization and the render-only routes (INP-3).

Promises: every route that takes a prompt renders it here and so gives the same token ids; a chat template
in a request is refused unless the server allows it.
Does not know: how a template or a tokenizer works.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.base.errors import ClientError
from octavo.entrypoints.http.checks import check_chat, request_warnings
from octavo.entrypoints.http.context import RouteContext
from octavo.entrypoints.http.feature_fields import request_parts
from octavo.entrypoints.http.fields import visible_warnings, warning_headers
from octavo.entrypoints.http.generate import PromptJob, make_jobs
from octavo.entrypoints.http.prompts import Prompt, split_prompts
from octavo.entrypoints.http.sampling import chat_params, completion_params
from octavo.entrypoints.http.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from octavo.http.json import json_response
from octavo.inputs.renderer import EngineInput, check_token_ids
from octavo.serving.intake import check_answers

_OF_CHATS = (
    "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs",
    "reasoning_effort",
)  # fmt: skip


class RenderedPrompt(msgspec.Struct, frozen=True):
    """One prompt as text and ids; `prompt` is null when it came as ids."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    num_prompt_tokens: int


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """What a generating request would run with: its prompts and every sampling parameter, defaults included."""

    object: str = "render"
    model: str
    max_model_len: int
    prompts: list[RenderedPrompt]
    sampling_params: dict[str, Any]
    warnings: list[str] | UnsetType = UNSET


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Ids of a prompt."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | None = None
    warnings: list[str] | UnsetType = UNSET


class DetokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The text of ids."""

    prompt: str
    warnings: list[str] | UnsetType = UNSET


LONG_PROMPT = 4096  # token ids that are looked at beside the event loop


async def render_chat(context: RouteContext, req: ChatRequest | TokenizeRequest) -> EngineInput:
    """The conversation through the template and the tokenizer; raises `ClientError` with the template's words."""
    renderer, template = context.frontend.renderer, req.chat_template
    if (
        template is not None
        and template not in renderer.template.names
        and not context.server.trust_request_chat_template
    ):
        raise ClientError(
            "chat_template in a request is not allowed here; start the server with --trust-request-chat-template",
            param="chat_template",
        )
    more = dict(req.chat_template_kwargs or {})
    if req.reasoning_effort is not None:
        more.setdefault("reasoning_effort", req.reasoning_effort)
    tools = None if getattr(req, "tool_choice", None) == "none" else req.tools
    return await renderer.achat(
        req.messages,
        tools=tools,
        documents=req.documents,
        chat_template=template,
        chat_template_kwargs=more,
        add_generation_prompt=req.add_generation_prompt,
        continue_final_message=bool(req.continue_final_message),
        add_special_tokens=req.add_special_tokens,
    )


async def render_prompts(
    context: RouteContext, prompts: Sequence[Prompt], add_special_tokens: bool | None
) -> list[EngineInput]:
    """Text prompts and long id prompts through the tokenizer's threads, short id prompts as they are."""
    special = add_special_tokens is not False
    return list(await asyncio.gather(*(_render_prompt(context, prompt, special) for prompt in prompts)))


async def _render_prompt(context: RouteContext, prompt: Prompt, special: bool) -> EngineInput:
    renderer = context.frontend.renderer
    if isinstance(prompt, str):
        return await renderer.atext(prompt, add_special_tokens=special)
    return await renderer.atokens(prompt) if len(prompt) > LONG_PROMPT else renderer.tokens(prompt)


def _texts(context: RouteContext, ids: Sequence[int]) -> list[str]:
    return [context.tokenizer.token_text(token_id) for token_id in ids]


class RenderRoutes:
    """Render-only calls, `/tokenize` and `/detokenize`.

    Owns: nothing; the door has the state.
    """

    def __init__(self, context: RouteContext) -> None:
        self._context = context

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions/render`."""
        context = self._context
        req, warnings = await context.read(ChatRequest, request)
        model = context.model_name(req.model)
        check_chat(req)
        params = chat_params(req, context.frontend.info.default_sampling)
        check_answers(1, params.n, context.frontend.info.max_waiting_requests)
        jobs = make_jobs(context, [await render_chat(context, req)], params, req)
        return self._rendered(model, jobs, req, request, warnings)

    async def completion(self, request: Request) -> Response:
        """`POST /v1/completions/render`."""
        context = self._context
        req, warnings = await context.read(CompletionRequest, request)
        model = context.model_name(req.model)
        params = completion_params(req, context.frontend.info.default_sampling)
        prompts = split_prompts(
            req.prompt, lambda num: check_answers(num, params.n, context.frontend.info.max_waiting_requests)
        )
        inputs = await render_prompts(context, prompts, req.add_special_tokens)
        return self._rendered(model, make_jobs(context, inputs, params, req), req, request, warnings)

    def _rendered(
        self,
        model: str,
        jobs: list[PromptJob],
        req: ChatRequest | CompletionRequest,
        request: Request,
        warnings: list[str],
    ) -> Response:
        info = self._context.frontend.info
        request_parts(req, info.features, sum(job.params.n for job in jobs))
        inputs = [job.input for job in jobs]
        warnings += request_warnings(req, info)
        warnings += [warning for each in inputs for warning in each.warnings]
        shown = msgspec.to_builtins(msgspec.structs.asdict(jobs[0].params), str_keys=True)
        del shown["output_kind"]
        answer = Rendered(
            model=model,
            max_model_len=info.max_model_len,
            prompts=[RenderedPrompt(i.prompt, i.prompt_token_ids, len(i.prompt_token_ids)) for i in inputs],
            sampling_params=shown,
            warnings=visible_warnings(warnings),
        )
        return json_response(answer, headers=self._headers(request, warnings, req.request_id))

    def _headers(self, request: Request, warnings: list[str], request_id: str | None = None) -> dict[str, str]:
        return warning_headers(warnings, self._context.client_id(request, request_id))

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`."""
        context = self._context
        req, warnings = await context.read(TokenizeRequest, request)
        context.model_name(req.model)
        if (req.prompt is None) == (req.messages is None):
            raise ClientError("send either prompt or messages", param="prompt")
        for name in _OF_CHATS if req.messages is None else ():
            if getattr(req, name) is not None:
                raise ClientError(f"{name} goes with messages; a prompt has no template", param=name)
        if req.prompt is None:
            rendered = await render_chat(context, req)
            ids = rendered.prompt_token_ids
            warnings += rendered.warnings
        else:
            rendered = await context.frontend.renderer.atext(
                req.prompt, add_special_tokens=req.add_special_tokens is not False
            )
            ids = rendered.prompt_token_ids
        texts = await asyncio.to_thread(_texts, context, ids) if req.return_token_strs else None
        answer = TokenizeAnswer(
            count=len(ids),
            max_model_len=context.frontend.info.max_model_len,
            tokens=ids,
            token_strs=texts,
            warnings=visible_warnings(warnings),
        )
        return json_response(answer, headers=self._headers(request, warnings))

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        context = self._context
        req, warnings = await context.read(DetokenizeRequest, request)
        context.model_name(req.model)
        check_token_ids("tokens", req.tokens, context.tokenizer.vocab_size)
        text = await asyncio.to_thread(
            context.tokenizer.decode, req.tokens, skip_special_tokens=bool(req.skip_special_tokens)
        )
        answer = DetokenizeAnswer(prompt=text, warnings=visible_warnings(warnings))
        return json_response(answer, headers=self._headers(request, warnings))
