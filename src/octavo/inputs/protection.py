"""People's words in a template: marked so that none of them becomes a control token.

Promises: every string in what a client sent is marked, keys of objects too, and so are parts that form a control
token only side by side; what holds no control text is not touched.
Does not know: which texts are control tokens (the tokenizer's `protect` does), or templates.
"""

from collections.abc import Callable
from typing import Any

from octavo.inputs.verbatim import Verbatim

Protect = Callable[[str], str]


def protected(value: Any, protect: Protect) -> Any:
    """`value`, any JSON, with every string and key in it protected."""
    if isinstance(value, Verbatim):
        return Verbatim(protect(value))
    if isinstance(value, str):
        return protect(value)
    if isinstance(value, dict):
        return {protect(key): protected(item, protect) for key, item in value.items()}
    if isinstance(value, list):
        return _protected_parts(value, protect) if _are_parts(value) else [protected(item, protect) for item in value]
    return value


def _are_parts(values: list[Any]) -> bool:
    return len(values) > 1 and all(isinstance(v, dict) and isinstance(v.get("text"), str) for v in values)


def _protected_parts(parts: list[dict[str, Any]], protect: Protect) -> list[dict[str, Any]]:
    """Parts of a content, which a template may print one right after the other."""
    text = "".join(part["text"] for part in parts)
    marked = protect(text)
    if marked == text:  # as nearly always
        return [{**protected(part, protect), "text": part["text"]} for part in parts]
    out, at = [], 0
    for part in parts:
        begin = at
        for char in part["text"]:
            while marked[at] != char:  # what protection put in
                at += 1
            at += 1
        out.append({**protected(part, protect), "text": marked[begin:at]})
    out[-1]["text"] += marked[at:]
    return out
