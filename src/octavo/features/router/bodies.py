"""Which requests are handed from one server to another, and what each of the two is sent.

Promises: what the client sent is not changed but for what the hand-over needs; a body that is odd in any way goes whole
to one server, whose answer says what is wrong.
Does not know: servers, HTTP, or tokens (a prompt's length is an estimate).
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from octavo.base.numbers import same_json, whole

PARAMS = "kv_transfer_params"
BYTES_PER_TOKEN = 4  # of text, roughly, in most languages and tokenizers
TOKENS_PER_MESSAGE = 4

Body = Mapping[str, Any]


class RouteKind(StrEnum):
    """A generating route, by its path."""

    COMPLETION = "/v1/completions"
    CHAT = "/v1/chat/completions"


def only_prompt(body: Body) -> str | list[int] | None:
    """A completion's prompt where it has one; None for several, or none."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt:
        if (kinds := set(map(type, prompt))) <= {int}:
            return prompt
        if kinds <= {int, float}:
            ids = [token for token in map(whole, prompt) if token is not None]
            return ids if len(ids) == len(prompt) else None
        if len(prompt) == 1:
            return only_prompt({"prompt": prompt[0]})
    return None


def estimated_tokens(body: Body, kind: RouteKind) -> int:
    """About how long the prompt is."""
    if kind is RouteKind.COMPLETION:
        prompt = only_prompt(body)
        return 0 if prompt is None else len(prompt) if isinstance(prompt, list) else _text_tokens(prompt)
    messages = body.get("messages")
    if not isinstance(messages, list):
        return 0
    return sum(TOKENS_PER_MESSAGE + _content_tokens(m.get("content")) for m in messages if isinstance(m, dict))


def _text_tokens(text: str) -> int:
    return len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN


def _content_tokens(content: object) -> int:
    if isinstance(content, str):
        return _text_tokens(content)
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return sum(_text_tokens(text) for text in texts if isinstance(text, str))


def worth_disaggregating(body: Body, kind: RouteKind, min_tokens: int) -> bool:
    """True for a request whose prompt one server may compute and whose answer another may make."""
    one_answer = all(body.get(name) is None or same_json(body[name], 1) for name in ("n", "best_of"))
    unscored = not body.get("echo") and body.get("prompt_logprobs") is None
    if not one_answer or not unscored or body.get(PARAMS) is not None:
        return False
    if kind is RouteKind.COMPLETION and only_prompt(body) is None:
        return False
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) is None:
            continue
        limit = whole(body[name])
        if limit is None or limit <= 1:
            return False
    return estimated_tokens(body, kind) >= min_tokens


def prefill_body(body: Body, kind: RouteKind) -> dict[str, Any]:
    """What the server that computes the prompt is sent: the same request for one token, to be kept for another."""
    left_out = ("stream_options", "min_tokens", "best_of")
    sent = {name: value for name, value in body.items() if name not in left_out}
    sent |= {"stream": False, "max_tokens": 1, PARAMS: {"do_remote_decode": True}}
    if "n" in sent:
        sent["n"] = 1
    if kind is RouteKind.CHAT and sent.get("max_completion_tokens") is not None:
        sent["max_completion_tokens"] = 1
    return sent


def decode_body(body: Body, params: Mapping[str, Any]) -> dict[str, Any]:
    """What the server that goes on is sent: the client's request, and where the prompt's KV is."""
    return {**body, PARAMS: dict(params)}


def params_of(answer: object) -> dict[str, Any] | None:
    """Where the prompt's KV is, by the first server's answer; None when it keeps nothing for another."""
    params = answer.get(PARAMS) if isinstance(answer, dict) else None
    return params if isinstance(params, dict) and params else None
