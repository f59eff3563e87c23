"""One shape for whatever message list a client sends (INP-10, INP-15).

Promises: every message that comes out has a known role and content that is a string or a list of text
parts; tool calls have object arguments; mistakes are named with their place, as `messages[2].content[0]`.
Does not know: templates, tokens, or media (this model takes text).
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from octavo.base.errors import ClientError

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
MEDIA_KEYS = {
    "image_url": "images", "input_image": "images", "image": "images", "image_embeds": "images", "image_pil": "images",
    "input_audio": "audio", "audio_url": "audio", "audio": "audio", "audio_embeds": "audio",
    "video_url": "video", "video": "video", "file": "files", "input_file": "files", "prompt_embeds": "embeddings",
}  # fmt: skip
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # first is the one most templates read

_log = logging.getLogger(__name__)


def normalize(messages: object) -> list[Message]:
    """Check a message list and bring it into one shape; raises `ClientError` with the place of a mistake.

    A null or missing content becomes "" except with the assistant, whose content key is then left out:
    a turn that only calls tools has none, and templates ask whether it is there.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ClientError(f"messages must be a list of messages, got {_kind(messages)}", param="messages")
    if not messages:
        raise ClientError("messages must hold at least one message", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def check_objects(name: str, values: object) -> list[dict[str, Any]] | None:
    """`tools` or `documents`: a list of objects, or None when there are none."""
    if values is None:
        return None
    if isinstance(values, str | Mapping) or not isinstance(values, Sequence):
        raise ClientError(f"{name} must be a list of objects, got {_kind(values)}", param=name)
    plain = [to_plain(value) for value in values]
    for i, value in enumerate(plain):
        if not isinstance(value, dict):
            raise ClientError(f"{name}[{i}] must be an object, got {_kind(value)}", param=name)
        function = value.get("function")
        if (
            name == "tools"
            and "function" in value
            and not (isinstance(function, dict) and isinstance(function.get("name"), str))
        ):
            raise ClientError(f"tools[{i}].function must be an object with a name", param=name)
    return plain or None


def to_plain(value: Any) -> Any:
    """JSON types only: templates are other people's code and get nothing with methods of its own.

    Objects of client libraries (with `model_dump`) become dictionaries; anything else becomes its type's name.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if callable(dump := getattr(value, "model_dump", None)):
        return to_plain(dump())
    for kind in (str, int, float):  # subclasses, such as enumerations
        if isinstance(value, kind):
            return kind(value)
    return f"<{type(value).__name__}>"


def _message(message: Any, where: str) -> Message:
    plain = to_plain(message)
    if not isinstance(plain, dict):
        raise ClientError(f"{where} must be an object with role and content, got {_kind(message)}", param=where)
    role = plain.get("role")
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise ClientError(f"{where}.role must be one of {known}, got {role!r}", param=f"{where}.role")
    out = {key: value for key, value in plain.items() if value is not None}  # templates print None as text
    content, thinking = _content(plain.get("content"), f"{where}.content")
    if content is None and role != "assistant":
        content = ""
    if content is not None:
        out["content"] = content
    _add_reasoning(out, thinking)
    _add_tool_calls(out, where)
    return out


def _add_reasoning(message: Message, thinking: str | None) -> None:
    """Reasoning under the names that templates use for it."""
    given = next((message[key] for key in REASONING_KEYS if key in message), thinking)
    if given is not None:
        message.setdefault("thinking", given)
        message["reasoning_content"] = given


# ---- content ------------------------------------------------------------------------------------


def _content(content: Any, where: str) -> tuple[str | list[dict[str, Any]] | None, str | None]:
    """The content, and the thinking that stood among its parts."""
    if content is None or isinstance(content, str):
        return content, None
    if isinstance(content, dict):  # one part without its list
        content = [content]
    if not isinstance(content, list):
        raise ClientError(f"{where} must be a string or a list of parts, got {_kind(content)}", param=where)
    parts: list[dict[str, Any]] = []
    thinking: list[str] = []
    for i, part in enumerate(content):
        kind, text = _part(part, f"{where}[{i}]")
        if kind == "thinking":
            thinking.append(text)
        else:
            parts.append({"type": "text", "text": text})
    return parts, "\n".join(thinking) if thinking else None


def _part(part: Any, where: str) -> tuple[str, str]:
    """A part's kind ('text' or 'thinking') and its text, in OpenAI's shape or the short one without type."""
    if isinstance(part, str):
        return "text", part
    if not isinstance(part, dict):
        raise ClientError(f"{where} must be an object or a string, got {_kind(part)}", param=where)
    kind = part.get("type") or next((key for key in (*TEXT_KEYS, *MEDIA_KEYS, "thinking") if key in part), None)
    if not isinstance(kind, str):
        raise ClientError(f"{where} needs a type, such as text, or a text of its own", param=where)
    if kind in TEXT_KEYS:
        return "text", _text(part, TEXT_KEYS[kind], where)
    if kind in ("thinking", "reasoning"):
        return "thinking", _text(part, "thinking" if "thinking" in part else "text", where)
    if kind == "tool_result":
        inner, _ = _content(part.get("content"), f"{where}.content")
        return "text", join_parts(inner or "")
    if kind in MEDIA_KEYS:
        raise ClientError(
            f"{where} is of type {kind}, but this model reads text only: it takes no {MEDIA_KEYS[kind]} (no vision, "
            f"no hearing); send text parts",
            param=where,
        )
    known = ", ".join(TEXT_KEYS)
    raise ClientError(f"{where} has the unknown type {kind!r}; known types are {known}", param=where)


def _text(part: Mapping[str, Any], key: str, where: str) -> str:
    text = part.get(key)
    if not isinstance(text, str):
        raise ClientError(f"{where}.{key} must be a string, got {_kind(text)}", param=where)
    return text


def join_parts(content: str | Iterable[Mapping[str, Any]]) -> str:
    """Content as one string: text parts follow each other on lines of their own."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


# ---- tool calls ---------------------------------------------------------------------------------


def _add_tool_calls(message: Message, where: str) -> None:
    """Tool calls with object arguments; the older single `function_call` becomes one of them."""
    calls = message.pop("tool_calls", None)
    single = message.pop("function_call", None)
    if calls is None and single is not None:
        calls = [{"type": "function", "function": single}]
    if calls is None:
        return
    if not isinstance(calls, list):
        raise ClientError(f"{where}.tool_calls must be a list, got {_kind(calls)}", param=f"{where}.tool_calls")
    if calls:
        message["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise ClientError(f"{where} must be an object, got {_kind(call)}", param=where)
    if "function" not in call and "name" in call:  # the short shape
        rest = {key: value for key, value in call.items() if key not in ("name", "arguments")}
        call = {
            "type": "function",
            **rest,
            "function": {key: call[key] for key in ("name", "arguments") if key in call},
        }
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ClientError(f"{where}.function must be an object with a name", param=f"{where}.function")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"), where)}}


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    """The arguments as an object; broken ones become an empty object, so that one bad turn costs one turn."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = arguments[:80]
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        _log.warning("%s.function.arguments is not a JSON object and was read as {}: %r", where, arguments)
        return {}
    return arguments


def _kind(value: object) -> str:
    """A value's type in the words of JSON."""
    names = {"NoneType": "null", "dict": "an object", "list": "a list", "str": "a string", "int": "a number"}
    name = type(value).__name__
    return names.get(name, {"float": "a number", "bool": "a boolean", "tuple": "a list"}.get(name, name))
