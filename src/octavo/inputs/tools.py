"""Tool definitions: checked before a template prints them into a prompt (INP-16).

Promises: every tool that comes out is a function with a name that OpenAI's interface would take, and parameters that have
the form of a JSON schema; a mistake is named with its place, as `tools[0].function.parameters.properties.city.type`.
Does not know: templates, or whether calls keep to a schema.

Source: the JSON Schema vocabularies, draft 2020-12, sections 10 (core) and 6 (validation), for which keyword takes what.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from octavo.base.errors import ClientError
from octavo.base.numbers import whole
from octavo.inputs.messages import kind_of, to_plain

_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}\Z")
_TYPES: Final = ("string", "number", "integer", "boolean", "object", "array", "null")
MAX_DEPTH: Final = 64  # of a schema inside schemas
_SCHEMA: Final = (
    "items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains", "not",
    "if", "then", "else", "propertyNames", "contentSchema",
)  # fmt: skip
_SCHEMAS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED_SCHEMAS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COUNTS: Final = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains",
)  # fmt: skip
_NUMBERS: Final = ("minimum", "maximum", "multipleOf", "exclusiveMinimum", "exclusiveMaximum")
_TEXTS: Final = ("title", "description", "$ref", "$id", "$schema", "$comment", "$anchor", "pattern", "format")
_FLAGS: Final = ("uniqueItems", "deprecated", "readOnly", "writeOnly")


def check_tools(tools: object) -> list[dict[str, Any]] | None:
    """The tools as plain JSON, or None when there are none; raises `ClientError` with the place of a mistake."""
    if tools is None:
        return None
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise ClientError(f"tools must be a list of objects, got {kind_of(tools)}", param="tools")
    return [_tool(to_plain(tool), f"tools[{i}]") for i, tool in enumerate(tools)] or None


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise ClientError(f"{where} must be an object, got {kind_of(tool)}", param=where)
    if tool.get("type", "function") != "function":
        raise ClientError(f"{where}.type must be 'function', the one kind of tool there is here", param=f"{where}.type")
    function, place = tool.get("function"), f"{where}.function"
    if not isinstance(function, dict):
        got = "nothing" if "function" not in tool else kind_of(function)
        raise ClientError(f"{place} must be an object with a name, got {got}", param=place)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.match(name):
        got = f"{name[:80]!r}" if isinstance(name, str) else kind_of(name) if "name" in function else "nothing"
        raise ClientError(
            f"{place}.name must be 1 to 64 letters, digits, underscores or hyphens, got {got}", param=f"{place}.name"
        )
    _typed(function, "description", str, "a string", place)
    _typed(function, "strict", bool, "true or false", place)
    _parameters(function.get("parameters"), f"{place}.parameters")
    return {"type": "function", **tool}


def _parameters(parameters: Any, where: str) -> None:
    if parameters is None:
        return
    if not isinstance(parameters, dict):
        raise ClientError(f"{where} must be an object, a JSON schema, got {kind_of(parameters)}", param=where)
    check_schema(parameters, where)
    kind = parameters.get("type", "object")
    if kind != "object" and "object" not in kind:
        raise ClientError(f"{where}.type must be 'object': arguments have names", param=f"{where}.type")


def check_schema(schema: Any, where: str, depth: int = 0) -> None:
    """Whether `schema` has the form of a JSON schema; unknown keywords are nobody's. Raises `ClientError`."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ClientError(f"{where} must be a JSON schema, an object, got {kind_of(schema)}", param=where)
    if depth > MAX_DEPTH:
        raise ClientError(f"{where} lies in more than {MAX_DEPTH} schemas; that is too deep", param=where[:200])
    _check_keywords(schema, where)
    for name in _SCHEMA:
        if name in schema:
            inner = schema[name]
            if name == "items" and isinstance(inner, list):  # tuples of older drafts
                _each(inner, f"{where}.items", depth)
            else:
                check_schema(inner, f"{where}.{name}", depth + 1)
    for name in _SCHEMAS:
        if name in schema:
            place = f"{where}.{name}"
            if not isinstance(schema[name], list) or not schema[name]:
                raise ClientError(f"{place} must be a list of schemas, got {kind_of(schema[name])}", param=place)
            _each(schema[name], place, depth)
    for name in _NAMED_SCHEMAS:
        if name in schema:
            place = f"{where}.{name}"
            if not isinstance(schema[name], dict):
                raise ClientError(f"{place} must be an object of schemas, got {kind_of(schema[name])}", param=place)
            for key, inner in schema[name].items():
                check_schema(inner, f"{place}.{key[:60]}", depth + 1)


def _each(schemas: list[Any], where: str, depth: int) -> None:
    for i, inner in enumerate(schemas):
        check_schema(inner, f"{where}[{i}]", depth + 1)


def _check_keywords(schema: dict[str, Any], where: str) -> None:
    """Keywords whose values are no schemas."""
    _check_type(schema, where)
    for name in _TEXTS:
        _typed(schema, name, str, "a string", where)
    for name in _FLAGS:
        _typed(schema, name, bool, "true or false", where)
    for name in _NUMBERS:
        value = schema.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise _wrong(where, name, "a number", value)
    for name in _COUNTS:
        if name in schema and ((count := whole(schema[name])) is None or count < 0):
            raise _wrong(where, name, "an integer of at least 0", schema[name])
    for name in ("enum", "examples"):
        _typed(schema, name, list, "a list", where)
    names = schema.get("required", [])
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise _wrong(where, "required", "a list of strings", names)


def _check_type(schema: dict[str, Any], where: str) -> None:
    if "type" not in schema:
        return
    given = schema["type"]
    kinds = given if isinstance(given, list) and given else [given]
    for kind in kinds:
        if not isinstance(kind, str) or kind not in _TYPES:
            got = f"{kind[:60]!r}" if isinstance(kind, str) else kind_of(kind)
            raise ClientError(f"{where}.type must be of {', '.join(_TYPES)}, got {got}", param=f"{where}.type")


def _typed(values: dict[str, Any], name: str, kind: type, words: str, where: str) -> None:
    if values.get(name) is not None and not isinstance(values[name], kind):
        raise _wrong(where, name, words, values[name])


def _wrong(where: str, name: str, words: str, value: object) -> ClientError:
    place = f"{where}.{name}"
    return ClientError(f"{place} must be {words}, got {kind_of(value)}", param=place)
