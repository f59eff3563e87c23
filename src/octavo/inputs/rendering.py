"""One conversation through one template: failures in the client's words, and the shapes that templates differ about.

Promises: whatever a template does wrong is a `ClientError` with its own words and no stack; of the shapes that a
conversation may be given in, the first is taken that the template renders whole; what it leaves out is said.
Does not know: which template, tokens, or HTTP.

Shapes. Some templates take one system message only: further ones are then joined to the first. Some walk through a
call's arguments: a text that is no object (`Verbatim`) is then shown to them as an object with that text in it.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from jinja2 import UndefinedError

from octavo.base.errors import ClientError
from octavo.inputs.messages import Message
from octavo.inputs.sandbox import CompiledTemplate, TemplateRefusal, tojson
from octavo.inputs.verbatim import Verbatim

# Ends in a space to learn whether the template trims what it is given; written by nobody else.
CONTINUE_HERE: Final = "\U000f0002octavo:continue-here\U000f0003 "
SYSTEM_ROLES: Final = ("system", "developer")
BETWEEN_SYSTEM_TEXTS: Final = "\n\n"
MAX_ERROR: Final = 500  # characters of a template's message that are passed on

_log = logging.getLogger(__name__)


class TemplateFailed(ClientError):
    """The template, not the client, did something wrong: whoever runs the server wants to know."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A template with its variables; `continues`: the text ends where the final message's content ends."""

    template: CompiledTemplate
    variables: Mapping[str, Any]
    continues: bool

    def text(self, conversation: list[Message]) -> str:
        """The conversation as text; raises `ClientError` for whatever the template refuses."""
        if self.continues:
            return _continued(conversation, lambda chat: _render(self.template, chat, self.variables))
        return _render(self.template, conversation, self.variables)

    def uses(self, name: str, conversation: list[Message], text: str) -> bool:
        """Whether the variable `name` has any part in `text`, which is this conversation's."""
        if name not in self.template.variables:
            return False
        try:
            return replace(self, variables={**self.variables, name: None}).text(conversation) != text
        except ClientError:
            return True


def drawn(drawing: Drawing, conversation: list[Message], warn: Callable[[str], None]) -> tuple[str, list[Message]]:
    """The text of the conversation, and the shape of it that was taken.

    `warn` hears what the template leaves out, and which arguments are shown as text that is no JSON object. Raises `ClientError` when the template renders none of the shapes.
    """
    needles = list(_needles(conversation))
    refusal = ClientError("there is nothing to render", param="messages")  # never the last word: there is a shape
    best: tuple[str, list[Message]] | None = None
    for shape in _shapes(conversation):
        try:
            text = drawing.text(shape)
        except ClientError as error:
            refusal = error if shape is conversation else refusal
            continue
        best = best or (text, shape)
        if all(_is_in(needle, text) for _, needle in needles):
            best = text, shape
            break
    if best is None:
        final = _at_arguments(drawing, conversation, refusal)
        if isinstance(final, TemplateFailed):
            _log.warning("%s", final.message)
        raise final
    for place, needle in needles:
        if not _is_in(needle, best[0]):
            warn(f"{place} is left out or changed by the chat template")
        elif isinstance(needle, Verbatim):
            warn(f"{place} is no JSON object; the model reads it as it was sent")
    return best


def check_continued(conversation: Sequence[Message]) -> None:
    """Raise `ClientError` unless there is an assistant's message to go on with."""
    role = conversation[-1]["role"]
    if role != "assistant":
        raise ClientError(
            f"continue_final_message needs a final message of the role assistant, got {role}: the model goes on with "
            f"its own words only",
            param="continue_final_message",
        )


# ---- shapes -------------------------------------------------------------------------------------


def _shapes(conversation: list[Message]) -> Iterator[list[Message]]:
    """The conversation as it is, and what may be tried where a template cannot bear that."""
    joined = _joined_system(conversation)
    for shape in (conversation, joined):
        if shape is not None:
            yield shape
    if any(isinstance(arguments, Verbatim) for _, arguments in _all_arguments(conversation)):
        for shape in (conversation, joined):
            if shape is not None:
                yield _with_arguments(shape, lambda text: {"arguments": str(text)})


def _joined_system(conversation: list[Message]) -> list[Message] | None:
    """System messages joined to the first of them, in their order; None where there are fewer than two."""
    texts = [message["content"] for message in conversation if message["role"] in SYSTEM_ROLES]
    if len(texts) < 2:
        return None
    content: Any = texts[0]
    for text in texts[1:]:
        if isinstance(content, str) and isinstance(text, str):
            content = content + BETWEEN_SYSTEM_TEXTS + text
        else:
            content = [*_parts(content), {"type": "text", "text": BETWEEN_SYSTEM_TEXTS}, *_parts(text)]
    out: list[Message] = []
    for message in conversation:
        if message["role"] not in SYSTEM_ROLES:
            out.append(message)
        elif content is not None:
            out.append({**message, "content": content})
            content = None
    return out


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _with_arguments(conversation: list[Message], change: Callable[[Verbatim], Any]) -> list[Message]:
    """The conversation with other arguments in place of texts that are no JSON object."""

    def changed(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if not isinstance(function["arguments"], Verbatim):
            return call
        return {**call, "function": {**function, "arguments": change(function["arguments"])}}

    return [
        {**m, "tool_calls": [changed(c) for c in m["tool_calls"]]} if "tool_calls" in m else m for m in conversation
    ]


def _all_arguments(conversation: list[Message]) -> Iterator[tuple[str, Any]]:
    for i, message in enumerate(conversation):
        for j, call in enumerate(message.get("tool_calls", ())):
            yield f"messages[{i}].tool_calls[{j}].function.arguments", call["function"]["arguments"]


def _needles(conversation: list[Message]) -> Iterator[tuple[str, str]]:
    """Texts that the prompt must hold, with their places: what the system says, and broken arguments."""
    for i, message in enumerate(conversation):
        if message["role"] in SYSTEM_ROLES:
            for part in _parts(message["content"]):
                yield f"messages[{i}].content", part["text"]
    for place, arguments in _all_arguments(conversation):
        if isinstance(arguments, Verbatim):
            yield place, arguments


def _is_in(needle: str, text: str) -> bool:
    bare = needle.strip()
    return bare in text or tojson(str(bare))[1:-1] in text


def _at_arguments(drawing: Drawing, conversation: list[Message], error: ClientError) -> ClientError:
    """`error`, or one that names the broken arguments when it is these that the template cannot take."""
    place = next((place for place, each in _all_arguments(conversation) if isinstance(each, Verbatim)), None)
    if place is None:
        return error
    try:
        drawing.text(_with_arguments(conversation, lambda _: {}))
    except ClientError:
        return error
    return ClientError(f"{place} is no JSON object, and the chat template cannot take its text", param=place)


# ---- rendering ----------------------------------------------------------------------------------


def _render(template: CompiledTemplate, conversation: list[Message], variables: Mapping[str, Any]) -> str:
    """Render, and turn every failure into the client's words.

    An assistant's turn without content is shown to the template as absent (as null where it tests for null);
    a template that cannot bear that gets an empty string.
    """
    bare = [message for message in conversation if "content" not in message]
    if bare and template.tests_content_none:
        shown = [message if "content" in message else {**message, "content": None} for message in conversation]
    else:
        shown = conversation
    try:
        try:
            return template.render(messages=shown, **variables)
        except (UndefinedError, TypeError):
            if not bare:
                raise
            return template.render(messages=[{"content": "", **message} for message in conversation], **variables)
    except TemplateRefusal as e:
        raise ClientError(
            f"the chat template refused these messages: {short(str(e))}", param="messages", code="chat_template_error"
        ) from None
    except Exception as e:  # a template is a program; whatever it does wrong ends this request only
        reason = short(f"{type(e).__name__}: {e}")
        raise TemplateFailed(
            f"the chat template failed on these messages: {reason}", param="messages", code="chat_template_error"
        ) from None


def _continued(conversation: list[Message], render: Callable[[list[Message]], str]) -> str:
    """Render with a mark after the final message's content, and cut there."""
    *before, last = conversation
    content = last.get("content")
    if content is None or content == []:
        raise ClientError("continue_final_message needs a final message with content", param="continue_final_message")
    if isinstance(content, str):
        text, marked = content, content + CONTINUE_HERE
        text_out = render([*before, {**last, "content": marked}])
    else:
        text = content[-1]["text"]
        parts = [*content[:-1], {**content[-1], "text": text + CONTINUE_HERE}]
        text_out = render([*before, {**last, "content": parts}])
    end = text_out.rfind(CONTINUE_HERE.rstrip())
    if end < 0 or text.strip() not in text_out:
        raise ClientError(
            "continue_final_message cannot be done: the chat template leaves out or changes the final message",
            param="continue_final_message",
        )
    kept = text_out[:end]
    return kept if text_out.startswith(CONTINUE_HERE, end) else kept.rstrip()


def short(text: str) -> str:
    """One line, of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_ERROR else line[: MAX_ERROR - 1] + "…"
