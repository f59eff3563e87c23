"""One shape for whatever message list a client sends (INP-10, INP-15).

Promises: every message that comes out has a known role and content that is a string or a list of text
parts; tool calls have object arguments, or `Verbatim` text where what was sent is no JSON object; mistakes are
named with their place, as `messages[2].content[0]`.
Does not know: templates, tokens, or media (this model takes text).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from octavo.base.errors import ClientError
from octavo.inputs.verbatim import Verbatim

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
MEDIA_KEYS = {
    "image_url": "images", "input_image": "images", "image": "images", "image_embeds": "images", "image_pil": "images",
    "input_audio": "audio", "audio_url": "audio", "audio": "audio", "audio_embeds": "audio",
    "video_url": "video", "video": "video", "file": "files", "input_file": "files", "prompt_embeds": "embeddings",
}  # fmt: skip
MAX_ARGUMENT_DEPTH = 100  # objects and lists inside each other; deeper ones stay the text that they came as
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # first is the one most templates read
_TEXTS = ("name", "tool_call_id", "refusal", *REASONING_KEYS)
_REQUIRED = {"tool": "tool_call_id", "function": "name"}  # beside content


def normalize(messages: object) -> list[Message]:
    """Check a message list and bring it into one shape; raises `ClientError` with the place of a mistake.

    An assistant's turn that only calls tools has no content; its content key is then left out, since templates ask
    whether it is there. A tool's null content becomes "".
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ClientError(f"messages must be a list of messages, got {kind_of(messages)}", param="messages")
    if not messages:
        raise ClientError("messages must hold at least one message", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def check_objects(name: str, values: object) -> list[dict[str, Any]] | None:
    """`documents` and the like: a list of objects, or None when there are none."""
    if values is None:
        return None
    if isinstance(values, str | Mapping) or not isinstance(values, Sequence):
        raise ClientError(f"{name} must be a list of objects, got {kind_of(values)}", param=name)
    plain = [to_plain(value) for value in values]
    for i, value in enumerate(plain):
        if not isinstance(value, dict):
            raise ClientError(f"{name}[{i}] must be an object, got {kind_of(value)}", param=name)
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
        raise ClientError(f"{where} must be an object with role and content, got {kind_of(message)}", param=where)
    role = plain.get("role")
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise ClientError(f"{where}.role must be one of {known}, got {role!r}", param=f"{where}.role")
    out = {key: value for key, value in plain.items() if value is not None}  # templates print None as text
    for key in _TEXTS:
        if not isinstance(out.get(key, ""), str):
            raise ClientError(f"{where}.{key} must be a string, got {kind_of(out[key])}", param=f"{where}.{key}")
    if (key := _REQUIRED.get(role, "role")) not in out:
        raise _missing(f"{where}.{key}", f"a message of the role {role} needs it")
    content, thinking = _content(plain.get("content"), f"{where}.content")
    _add_reasoning(out, thinking)
    _add_tool_calls(out, where)
    if content is None:
        content = _absent_content(plain, out, where)
    if content is not None:
        out["content"] = content
    return out


def _absent_content(given: Mapping[str, Any], message: Message, where: str) -> str | None:
    """What stands for a content that is null or missing; raises `ClientError` where a message needs one."""
    role = message["role"]
    if role in _REQUIRED and "content" in given:  # a tool that had nothing to say
        return ""
    if role != "assistant":
        raise _missing(f"{where}.content", f"a message of the role {role} needs a text")
    if "refusal" in message:
        return str(message["refusal"])
    if "content" in given or "tool_calls" in message or "reasoning_content" in message:  # null: it said nothing
        return None
    raise _missing(f"{where}.content", "a message of the role assistant needs a text, or tool_calls")


def _missing(place: str, why: str) -> ClientError:
    return ClientError(f"{place} is required: {why}", param=place, code="missing_field")


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
        raise ClientError(f"{where} must be a string or a list of parts, got {kind_of(content)}", param=where)
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
        raise ClientError(f"{where} must be an object or a string, got {kind_of(part)}", param=where)
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
        raise ClientError(f"{where}.{key} must be a string, got {kind_of(text)}", param=where)
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
        raise ClientError(f"{where}.tool_calls must be a list, got {kind_of(calls)}", param=f"{where}.tool_calls")
    if calls:
        message["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise ClientError(f"{where} must be an object, got {kind_of(call)}", param=where)
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
    if call.get("type", "function") != "function":
        raise ClientError(f"{where}.type must be 'function', the one kind of call there is here", param=f"{where}.type")
    if not isinstance(call.get("id") or "", str):
        raise ClientError(f"{where}.id must be a string, got {kind_of(call['id'])}", param=f"{where}.id")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: Any) -> dict[str, Any] | Verbatim:
    """The arguments as an object, or as the text that was sent where they are none: a model that broke off its call
    reads what it wrote, and one bad turn costs one turn."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return Verbatim(text)
    return value if isinstance(value, dict) and not _is_deep(value, MAX_ARGUMENT_DEPTH) else Verbatim(text)


def _is_deep(value: Any, allowed: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return allowed < 0 or any(_is_deep(item, allowed - 1) for item in inner)


def kind_of(value: object) -> str:
    """A value's type in the words of JSON."""
    names = {"NoneType": "null", "dict": "an object", "list": "a list", "str": "a string", "int": "a number"}
    name = type(value).__name__
    return names.get(name, {"float": "a number", "bool": "a boolean", "tuple": "a list"}.get(name, name))
