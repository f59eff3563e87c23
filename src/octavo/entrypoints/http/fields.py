"""From a JSON object to a checked request: one place for messages about fields (INP-20).

Promises: a wrong type is a `ClientError` that names the field and what it must be; an unknown field
close to a known one is refused with the suggestion, others come back as warnings; a big value is
never repeated in a message.
Does not know: routes, sampling, or what fields mean.
"""

import difflib
import logging
from collections.abc import Container, Sequence
from typing import Any, TypeVar

from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ValidationError

from octavo.base.errors import ClientError
from octavo.base.numbers import same_json
from octavo.entrypoints.http.schemas import MOST_CHARS, MOST_ENTRIES, NOT_SERVED
from octavo.http.body import json_kind
from octavo.http.errors import not_available

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
WARNING_HEADER = "X-Octavo-Warning"
MAX_UNKNOWN_FIELDS = 32
_CLOSE = 0.82  # ratio from which a name counts as a misspelling
_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_UNION_LABELS = frozenset({"str", "int", "float", "bool"})


def read_fields(kind: type[M], body: dict[str, Any]) -> tuple[M, list[str]]:
    """Check `body` against `kind`; returns the request and warnings about fields that are not used.

    Raises `ClientError` with `param` set.
    """
    _check_sizes(body, kind.model_fields)
    unknown = [name for name in body if name not in kind.model_fields]
    if unknown:
        _check_unknown(unknown, body, tuple(kind.model_fields))
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        raise _as_client_error(error) from None
    unused = [name for name in unknown if name not in NOT_SERVED]
    for field, value in request:
        if isinstance(value, BaseModel) and value.model_extra:
            inner = tuple(type(value).model_fields)
            _check_unknown(list(value.model_extra), value.model_extra, inner, prefix=f"{field}.")
            unused.extend(f"{field}.{name}" for name in value.model_extra)
    return request, [f"unknown field {_ascii(name)} is ignored" for name in unused]


def _check_sizes(body: dict[str, Any], known: Container[str]) -> None:
    """Refuse a list or object with too many entries before anybody looks at each of them (F80)."""
    for name, most in MOST_ENTRIES.items():
        value = body.get(name)
        if name in known and isinstance(value, list | dict) and len(value) > most:
            raise ClientError(f"{name} may hold at most {most} entries, got {len(value)}", param=name, code="too_many")
    for name, most in MOST_CHARS.items():
        value = body.get(name)
        for text in value if isinstance(value, list) else [value]:
            if name in known and isinstance(text, str) and len(text) > most:
                message = f"a string of {name} may have at most {most} characters, got {len(text)}"
                raise ClientError(message, param=name, code="too_long")


def warning_headers(warnings: Sequence[str], client_id: str) -> dict[str, str]:
    """The header that shows warnings to the client, empty without any; the log gets them too, with the request's id.

    Bodies have them whole (`visible_warnings`); a header is cut, and ASCII.
    """
    if not warnings:
        return {}
    text = "; ".join(warnings)
    logger.warning("request %s was accepted with warnings: %s", client_id, text)
    return {WARNING_HEADER: _ascii(text, 2000)}


def visible_warnings(warnings: Sequence[str]) -> list[str] | UnsetType:
    """Warnings as an answer's body has them: absent without any."""
    return list(warnings) or UNSET


def _ascii(text: str, limit: int = 60) -> str:
    """A text as it may stand in a header or a log line."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text[:limit])


def _check_unknown(names: list[str], body: dict[str, Any], known: tuple[str, ...], *, prefix: str = "") -> None:
    if len(names) > MAX_UNKNOWN_FIELDS:
        raise ClientError(f"the request has {len(names)} unknown fields", param=prefix + names[0][:60])
    for name in names:
        value = body[name]
        if name in NOT_SERVED:
            feature, harmless = NOT_SERVED[name]
            if value is not None and not any(same_json(value, one) for one in harmless):
                raise not_available(feature, param=name)
        elif close := _close_name(name, known):
            raise ClientError(
                f"unknown field {_ascii(prefix + name)!r}; did you mean {prefix + close!r}?",
                param=prefix + name[:60],
                code="unknown_field",
            )


def _close_name(name: str, known: tuple[str, ...]) -> str | None:
    if len(name) > 60:
        return None
    plain = {_plain(k): k for k in known}
    found = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=_CLOSE)
    return plain[found[0]] if found else None


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _as_client_error(error: ValidationError) -> ClientError:
    """The first wrong field, said once even when a union tried several types."""
    details = error.errors(include_url=False, include_context=True)
    field = details[0]["loc"][0]
    of_field = [(_path(d["loc"]), d) for d in details if d["loc"][0] == field]
    path = max((p for p, _ in of_field), key=len)
    same = [d for p, d in of_field if p == path]
    where = _join(path)
    if any(d["type"] == "missing" for d in same):
        return ClientError(f"{where} is required", param=where, code="missing_field")
    expected = dict.fromkeys(_EXPECTED[d["type"]] for d in same if d["type"] in _EXPECTED)
    if expected:
        got = shown(same[0]["input"])
        return ClientError(f"{where} must be {' or '.join(expected)}, got {got}", param=where, code="invalid_type")
    message = same[0]["msg"][:1].lower() + same[0]["msg"][1:]
    return ClientError(f"{where}: {message}, got {shown(same[0]['input'])}", param=where, code="invalid_value")


def _path(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """`loc` without the names of union members that pydantic puts between."""
    rest = (p for p in loc[1:] if isinstance(p, int) or not (p in _UNION_LABELS or p.startswith(("list[", "dict["))))
    return (loc[0], *rest)


def _join(path: tuple[int | str, ...]) -> str:
    out = str(path[0])
    for part in path[1:]:
        out += f"[{part}]" if isinstance(part, int) else f".{_ascii(part)}"
    return out


def shown(value: object) -> str:
    """A value in a message: scalars shortly, containers by kind."""
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else f"a string of {len(value)} characters"
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = f"{value:g}" if isinstance(value, float) else str(value)
        return text if len(text) <= 30 else "a very long number"
    return json_kind(value)
