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

from jinja2 import TemplateSyntaxError

from octavo.base.errors import ClientError, ConfigError
from octavo.inputs import template_files
from octavo.inputs.messages import Message, check_objects, join_parts, normalize, to_plain
from octavo.inputs.protection import Protect, protected
from octavo.inputs.rendering import Drawing, check_continued, drawn, short
from octavo.inputs.sandbox import CompiledTemplate, make_environment, tojson
from octavo.inputs.tools import check_tools
from octavo.inputs.verbatim import Verbatim

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
CONTENT_FORMATS = ("auto", "string", "openai")
_PROBE = {"probe_key": "probe_value"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How one conversation is rendered, beside its messages.

    `protect` marks the words of the conversation so that they yield no control tokens (see `tokenizer_fast`).
    `variables` are further names for the template, the request's own; they win over `special`, the model's tokens.
    """

    tools: Any = None
    documents: Any = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None  # a template's text, or the name of one of the model's
    protect: Protect | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    special: Mapping[str, str] = field(default_factory=dict)


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

    def render(self, messages: object, options: ChatOptions, warn: Callable[[str], None] = _log.warning) -> str:
        """The conversation as text; `warn` hears what is not as it was meant.

        With `continue_final_message` the text ends where the final message's content ends, so that the model
        goes on with it. Raises `ClientError` for messages that are not messages, for whatever the template refuses,
        and for tools or documents that it does not show to the model.
        """
        _check_options(options)
        conversation = normalize(messages)
        if options.continue_final_message:
            check_continued(conversation)
        tools, documents = check_tools(options.tools), check_objects("documents", options.documents)
        template = self._choose(options.chat_template, has_tools=tools is not None)
        protect = options.protect or _as_it_is
        variables = {
            **self._variables,
            **options.special,
            **protected(to_plain(options.variables), protect),
            "tools": protected(tools, protect),
            "documents": protected(documents, protect),
            "add_generation_prompt": options.add_generation_prompt,
        }
        drawing = Drawing(template, variables, options.continue_final_message)
        text, shape = drawn(drawing, self._prepare(template, conversation, protect), warn)
        for name in ("tools", "documents"):
            if variables[name] is not None and not drawing.uses(name, shape, text):
                raise _not_shown(name)
        _warn_of_unused(template, conversation, options.variables, warn)
        return text

    def _choose(self, asked: str | None, *, has_tools: bool) -> CompiledTemplate:
        """The template for this request: a named one, one sent along, or the model's own."""
        if asked is not None:
            if asked not in self._sources and not _is_template(asked):
                raise ClientError(
                    f"chat_template {short(repr(asked))} is no template's text, nor one of the model's templates "
                    f"({', '.join(self._sources) or 'it has none'}); a template in a file is given as the file's text",
                    param="chat_template",
                    code="chat_template_error",
                )
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
                f"the chat template does not compile: {short(str(e.message))} (line {e.lineno})",
                param="messages" if asked is None else "chat_template",
                code="chat_template_error",
            ) from None

    def _format_of(self, template: CompiledTemplate) -> str:
        if self._format != "auto":
            return self._format
        return "openai" if template.iterates_content else "string"

    def _prepare(self, template: CompiledTemplate, conversation: list[Message], protect: Protect) -> list[Message]:
        """Bring roles, content and tool arguments into the shape this template reads."""
        as_parts = self._format_of(template) == "openai"
        out = []
        for given in conversation:
            message = dict(given)
            if message["role"] == "developer" and not template.knows_developer:
                message["role"] = "system"
            if "content" in message:
                message["content"] = _shaped(message["content"], as_parts, template.tests_content_type)
            message = protected(message, protect)
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


def _is_template(text: str) -> bool:
    """False for what shows nothing of a conversation: a path, a name that is not known."""
    return "{{" in text or "{%" in text


def _override_text(override: str) -> str:
    path = Path(override)
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except OSError:  # a template's text can be too long for a file's name
        pass
    if not _is_template(override):
        raise ConfigError(f"--chat-template: there is no file {override!r}, and it is not a template either")
    return override


def _check_options(options: ChatOptions) -> None:
    """Raise `ClientError` for options that do not go together."""
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


def _not_shown(name: str) -> ClientError:
    """What to say of tools or documents that are not in the prompt."""
    return ClientError(
        f"the chat template does not show {name} to the model, so they would change nothing; leave {name} out, or start "
        f"with a --chat-template FILE that prints them",
        param=name,
        code=f"{name}_not_supported",
    )


def _warn_of_unused(
    template: CompiledTemplate, conversation: list[Message], asked: Mapping[str, Any], warn: Callable[[str], None]
) -> None:
    """Say which variables the template has no use for, and whether it leaves out calls of the history."""
    for name in asked:
        if name not in template.variables:
            warn(f"{str(name)[:60]} changes nothing: the chat template has no such variable")
    if "tool_calls" not in template.source and any("tool_calls" in message for message in conversation):
        warn("the chat template leaves out tool_calls of earlier messages")


def _as_it_is(text: str) -> str:
    return text


def _shaped(content: Any, as_parts: bool, takes_strings_too: bool) -> Any:
    """Content as this template reads it: a string, or a list of parts."""
    if not as_parts:
        return join_parts(content)
    if isinstance(content, str) and not takes_strings_too:
        return [{"type": "text", "text": content}]
    return content


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if isinstance(function["arguments"], Verbatim):  # a text already
        return dict(call)
    return {**call, "function": {**function, "arguments": tojson(function["arguments"])}}
