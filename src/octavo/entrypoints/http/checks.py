"""What a request asks for that this version does not do: refused by name, or said in a warning when it does no harm.

Promises: nothing that a client asks for is dropped in silence (INP-20); a value that asks for what is done anyway is
neither refused nor warned about.
Does not know: templates (`inputs.chat` warns of what they leave out), or how warnings are sent.
"""

import json
from typing import Any, Final

from octavo.base.errors import ClientError
from octavo.base.numbers import same_json
from octavo.entrypoints.http.fields import shown
from octavo.entrypoints.http.schemas import ChatRequest, GenerateRequest
from octavo.http.errors import not_available
from octavo.serving.info import EngineInfo
from octavo.serving.intake import priority_warning

TOOLS_AS_TEXT: Final = "tools reach the model, but this version returns its calls as text"
_TOOL_CHOICES: Final = ("none", "auto", "required")
_DONE_ANYWAY: Final[dict[str, tuple[tuple[Any, ...], str]]] = {  # field: values that ask for nothing, what is so here
    "store": ((False,), "nothing is stored here"),
    "service_tier": (("auto", "default"), "there are no service tiers here"),
    "prompt_cache_retention": (("in_memory", "in-memory"), "prompts stay cached while there is room"),
    "verbosity": (("medium",), "the model is not told"),
}


def check_chat(req: ChatRequest) -> None:
    """Refuse what this version does not serve (INP-20); raises `ClientError`."""
    _check_tool_choice(req)
    if req.modalities is not None and req.modalities != ["text"]:
        raise not_available("a modality other than text", param="modalities")


def _check_tool_choice(req: ChatRequest) -> None:
    choice = req.tool_choice
    if choice is None or choice in ("none", "auto"):
        return
    if isinstance(choice, str) and choice not in _TOOL_CHOICES:
        known = ", ".join(_TOOL_CHOICES)
        raise ClientError(f"tool_choice must be one of {known}, or name a function of tools", param="tool_choice")
    if not req.tools:
        raise ClientError("tool_choice needs tools: there is none to choose", param="tool_choice")
    if isinstance(choice, dict):
        _check_named(choice, req.tools)
    raise not_available("a forced tool_choice ('required' or a named tool)", param="tool_choice")


def _check_named(choice: dict[str, Any], tools: list[dict[str, Any]]) -> None:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise ClientError(
            'tool_choice must have the shape {"type": "function", "function": {"name": "..."}}', param="tool_choice"
        )
    functions = [tool.get("function") for tool in tools]
    known = [str(f.get("name")) for f in functions if isinstance(f, dict)]
    if name not in known:
        raise ClientError(
            f"tool_choice names the function {shown(name)}, which is not in tools; there are {', '.join(known)[:200]}",
            param="tool_choice.function.name",
        )


def request_warnings(req: GenerateRequest, info: EngineInfo) -> list[str]:
    """Sentences about fields that change nothing on this server as it was started."""
    out = []
    if warning := priority_warning(req.priority or 0, info):
        out.append(warning)
    for name, (harmless, why) in _DONE_ANYWAY.items():
        value = getattr(req, name, None) if name in type(req).model_fields else None  # else: an unknown field
        if value is not None and not any(same_json(value, one) for one in harmless):
            out.append(f"{name} {_shown(value)} changes nothing: {why}")
    if req.spaces_between_special_tokens is False and req.skip_special_tokens is False:
        out.append("spaces_between_special_tokens false changes nothing: the model's tokenizer decides about spaces")
    if isinstance(req, ChatRequest) and req.tools and req.tool_choice != "none":
        out += _tool_warnings(req)
    return out


def _shown(value: object) -> str:
    """A value of any size in a sentence."""
    return shown(value) if isinstance(value, list | dict | float) else json.dumps(value)[:60]


def _tool_warnings(req: ChatRequest) -> list[str]:
    out = [TOOLS_AS_TEXT]
    if req.parallel_tool_calls is False:
        out.append("parallel_tool_calls false is not enforced: a text may hold several calls")
    functions = [tool.get("function") for tool in req.tools or ()]
    strict = [i for i, f in enumerate(functions) if isinstance(f, dict) and f.get("strict") is True]
    out += [f"tools[{i}].function.strict is not enforced: arguments may differ from the schema" for i in strict[:3]]
    if len(strict) > 3:
        out.append(f"nor is that of {len(strict) - 3} more tools")
    return out
