"""Messages to the text a model was trained on, through its chat template.

Promises: the text that Transformers renders for the same messages; whatever a template or a message list
does wrong becomes a `ClientError` with the template's own words and no stack.
Does not know: tokens, HTTP, or media.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError, UndefinedError

from octavo.base.errors import ClientError, ConfigError
from octavo.inputs import template_files
from octavo.inputs.messages import Message, check_objects, join_parts, normalize, to_plain
from octavo.inputs.sandbox import CompiledTemplate, TemplateRefusal, make_environment, tojson

# Ends in a space to learn whether the template trims what it is given; written by nobody else.
CONTINUE_HERE = "\U000f0002octavo:continue-here\U000f0003 "
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
CONTENT_FORMATS = ("auto", "string", "openai")
MAX_ERROR = 500  # characters of a template's message that are passed on
PROTECTED_ROLES = ("user", "tool", "function")
_PROBE = {"probe_key": "probe_value"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How one conversation is rendered, beside its messages.

    `protect` marks text of users and tools so that it yields no control tokens (see `tokenizer_fast`).
    `variables` are further names for the template; a request's own win over the model's special tokens.
    """

    tools: Any = None
    documents: Any = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None  # a template's text, or the name of one of the model's
    protect: Callable[[str], str] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """A model's chat templates; `apply` may be called from any thread.

    Owns: the compiled templates, and what was learned about each of them.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        variables: Mapping[str, str] | None = None,
        content_format: str = "auto",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`sources` maps names to template texts: `default`, and `tool_use` for requests with tools.

        `variables` are the special tokens by the names templates use; `content_format` forces messages'
        content to be a string or a list of parts instead of asking the template (INP-12).
        """
        if content_format not in CONTENT_FORMATS:
            known = ", ".join(CONTENT_FORMATS)
            raise ConfigError(f"the chat content format must be one of {known}, got {content_format!r}")
        environment = make_environment(now)
        self._sources = dict(sources)
        self._variables = dict(variables or {})
        self._format = content_format
        self._compile = lru_cache(maxsize=32)(lambda source: CompiledTemplate(source, environment))
        self._text_arguments = lru_cache(maxsize=32)(self._wants_text_arguments)

    def __bool__(self) -> bool:
        """True when the model has any chat template."""
        return bool(self._sources)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model's templates."""
        return tuple(self._sources)

    @property
    def texts(self) -> tuple[str, ...]:
        """The model's templates as they are written."""
        return tuple(self._sources.values())

    def check(self) -> None:
        """Compile every template; raises `ClientError` for the first that does not."""
        for name in self._sources:
            self._choose(name, has_tools=False)

    def content_format(self) -> str:
        """What the default template wants: 'string' or 'openai' (a list of parts)."""
        return self._format_of(self._choose(None, has_tools=False))

    def apply(
        self,
        messages: object,
        *,
        tools: Any = None,
        documents: Any = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The conversation as text; see `render`. Further keywords are variables for the template."""
        options = ChatOptions(
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=kwargs,
        )
        return self.render(messages, options)

    def render(self, messages: object, options: ChatOptions) -> str:
        """The conversation as text.

        With `continue_final_message` the text ends where the final message's content ends, so that the model
        goes on with it. Raises `ClientError` for messages that are not messages, and for whatever the
        template refuses.
        """
        if options.continue_final_message and options.add_generation_prompt:
            raise ClientError(
                "add_generation_prompt must be false when continue_final_message is true: the model either begins a "
                "new message or goes on with the last one",
                param="continue_final_message",
            )
        if taken := RESERVED.intersection(options.variables):
            raise ClientError(
                f"chat_template_kwargs must not hold {', '.join(sorted(taken))}: send it as a field of its own",
                param="chat_template_kwargs",
            )
        conversation = normalize(messages)
        tools, documents = check_objects("tools", options.tools), check_objects("documents", options.documents)
        template = self._choose(options.chat_template, has_tools=tools is not None)
        conversation = self._prepare(template, conversation, options)
        variables = {
            **self._variables,
            **to_plain(options.variables),
            "tools": tools,
            "documents": _protected(documents, options.protect) if options.protect else documents,
            "add_generation_prompt": options.add_generation_prompt,
        }
        if options.continue_final_message:
            return _continued(conversation, lambda chat: _render(template, chat, variables))
        return _render(template, conversation, variables)

    def _choose(self, asked: str | None, *, has_tools: bool) -> CompiledTemplate:
        """The template for this request: a named one, one sent along, or the model's own."""
        if asked is not None:
            source = self._sources.get(asked, asked)
        elif not self._sources:
            raise ClientError(
                "this model has no chat template; send a prompt to completions, or start with --chat-template FILE",
                code="no_chat_template",
            )
        elif has_tools and "tool_use" in self._sources:
            source = self._sources["tool_use"]
        else:
            source = self._sources.get("default") or next(iter(self._sources.values()))
        try:
            return self._compile(source)
        except TemplateSyntaxError as e:
            raise ClientError(
                f"the chat template does not compile: {_short(str(e.message))} (line {e.lineno})",
                param="messages" if asked is None else "chat_template",
                code="chat_template_error",
            ) from None

    def _format_of(self, template: CompiledTemplate) -> str:
        if self._format != "auto":
            return self._format
        return "openai" if template.iterates_content else "string"

    def _prepare(self, template: CompiledTemplate, conversation: list[Message], options: ChatOptions) -> list[Message]:
        """Bring roles, content and tool arguments into the shape this template reads."""
        as_parts = self._format_of(template) == "openai"
        out = []
        for given in conversation:
            message = dict(given)
            if message["role"] == "developer" and not template.knows_developer:
                message["role"] = "system"
            if "content" in message:
                message["content"] = _shaped(message["content"], as_parts, template.tests_content_type)
            if options.protect is not None and message["role"] in PROTECTED_ROLES:
                role = message["role"]
                message = _protected(message, options.protect) | {"role": role}
            if "tool_calls" in message and self._text_arguments(template):
                message["tool_calls"] = [_with_text_arguments(call) for call in message["tool_calls"]]
            out.append(message)
        return out

    def _wants_text_arguments(self, template: CompiledTemplate) -> bool:
        """True for templates that print tool arguments as they are: these need JSON text, not an object.

        Asked once, by rendering a small conversation: an object that makes the template fail, or comes out as
        Python prints it, where the same as text comes out well.
        """

        def attempt(arguments: Any) -> str | None:
            call = {"id": "probe0000", "type": "function", "function": {"name": "probe", "arguments": arguments}}
            content = None if template.tests_content_none else ""
            chat = [
                {"role": "user", "content": _shaped("probe", template.iterates_content, template.tests_content_type)},
                {"role": "assistant", "content": content, "tool_calls": [call]},
            ]
            variables = {**self._variables, "tools": None, "documents": None, "add_generation_prompt": False}
            try:
                return template.render(messages=chat, **variables)
            except Exception:  # a template may fail in any way; that is the answer
                return None

        as_object = attempt(_PROBE)
        if as_object is not None and repr(_PROBE) not in as_object:
            return False
        as_text = tojson(_PROBE)
        return as_text in (attempt(as_text) or "")


def load_chat_template(
    source: str,
    override: str | None = None,
    *,
    variables: Mapping[str, str] | None = None,
    content_format: str = "auto",
    now: Callable[[], datetime] = datetime.now,
) -> ChatTemplate:
    """The chat templates of a model folder or GGUF file, or `override`: a file, a text, or one of their names.

    A model without any gives a `ChatTemplate` that is false and refuses chats. A template of the model's own
    that does not compile is logged, since completions do not need it; an override that does not, or that
    names no file, raises `ConfigError`.
    """
    own = template_files.read_templates(source)
    special = dict(variables) if variables is not None else template_files.read_variables(source)
    if override is not None:
        own = {"default": own[override]} if override in own else {"default": _override_text(override)}
    template = ChatTemplate(own, variables=special, content_format=content_format, now=now)
    try:
        template.check()
    except ClientError as e:
        if override is not None:
            raise ConfigError(f"--chat-template: {e.message}") from None
        _log.warning("%s; chats will be refused until another is given with --chat-template", e.message)
    return template


def _override_text(override: str) -> str:
    path = Path(override)
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except OSError:  # a template's text can be too long for a file's name
        pass
    if "{{" not in override and "{%" not in override:
        raise ConfigError(f"--chat-template: there is no file {override!r}, and it is not a template either")
    return override


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
            f"the chat template refused these messages: {_short(str(e))}", param="messages", code="chat_template_error"
        ) from None
    except Exception as e:  # a template is a program; whatever it does wrong ends this request only
        reason = _short(f"{type(e).__name__}: {e}")
        _log.warning("the chat template failed: %s", reason)
        raise ClientError(
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


def _shaped(content: Any, as_parts: bool, takes_strings_too: bool) -> Any:
    """Content as this template reads it: a string, or a list of parts."""
    if not as_parts:
        return join_parts(content)
    if isinstance(content, str) and not takes_strings_too:
        return [{"type": "text", "text": content}]
    return content


def _protected(value: Any, protect: Callable[[str], str]) -> Any:
    """Every string inside `value` protected; keys are names that the template knows and stay."""
    if isinstance(value, str):
        return protect(value)
    if isinstance(value, dict):
        return {key: _protected(item, protect) for key, item in value.items()}
    if isinstance(value, list):
        return [_protected(item, protect) for item in value]
    return value


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": tojson(function["arguments"])}}


def _short(text: str) -> str:
    """One line, of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_ERROR else line[: MAX_ERROR - 1] + "…"
