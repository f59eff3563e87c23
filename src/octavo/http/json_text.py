"""JSON text to Python values, strictly, within bounds, and without holding up other threads.

Promises: the values are those of the standard library's parser; no duplicate keys, NaN, or more than `MAX_DEPTH` levels
and `MAX_VALUES` values, `MAX_GROUPS` of them lists or objects; a long text is read in small steps, so that a thread that reads it lets the others go on, which
one call into the standard library's parser would not.
Does not know: HTTP, or what the values mean.
"""

import json
import re
from collections.abc import Callable
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, Final, NoReturn

from octavo.base.errors import ClientError

MAX_DEPTH: Final = 100  # levels of lists and objects; schemas of tools have some ten
MAX_VALUES: Final = 1_000_000  # numbers, strings, lists, objects and their keys
MAX_GROUPS: Final = 100_000  # lists and objects: the garbage collector looks at all of them at once, and all else waits
AT_ONCE: Final = 1 << 16  # characters that are parsed without a pause: a few milliseconds

_scan: Callable[[str, int, bool], tuple[str, int]] = scanstring
_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_NUMBERS = re.compile(r"(?:[-+.0-9eE]+[ \t\n\r]*,[ \t\n\r]*)+")  # several at once; each is checked when it is parsed
_STRING_PART = re.compile(r'[^"\\\x00-\x1f]*(?:\\(?:u[0-9a-fA-F]{4}|["\\/bfnrt])[^"\\\x00-\x1f]*)*')
_HIGH_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
_WORDS: Final = {"t": ("true", True), "f": ("false", False), "n": ("null", None)}


def parse(text: str) -> Any:
    """The value that `text` spells; raises `ClientError` with the place of what is wrong (API-06)."""
    try:
        if len(text) > AT_ONCE:
            return _Reader(text).whole()
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise ClientError(f"the request body is not valid JSON: {error.msg} at {where}", code="invalid_json") from None
    except RecursionError:
        _too_deep()
    except ClientError:
        raise
    except ValueError:  # an integer with thousands of digits
        raise ClientError("the request body holds a number that is too long", code="invalid_json") from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raise `ClientError` when lists and objects stand in each other more than `MAX_DEPTH` times (F81)."""
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            _too_deep()
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]


def _too_deep() -> NoReturn:
    raise ClientError(
        f"the request body is nested too deeply: at most {MAX_DEPTH} levels of lists and objects are read",
        code="invalid_json",
    )


def _too_many(most: int, what: str) -> NoReturn:
    raise ClientError(
        f"the request body holds more than {most} {what}; send it in several requests", code="request_too_large"
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                _given_twice(name)
            seen.add(name)
    return out


def _given_twice(name: str) -> NoReturn:
    raise ClientError(f"the field {name[:60]!r} is given twice", param=name[:60], code="invalid_json")


def _constant(name: str) -> NoReturn:
    raise ClientError(f"the request body is not valid JSON: {name} is not a JSON number", code="invalid_json")


class _Reader:
    """One long text being read; every step is short.

    Owns: how many values there were, and how many of them lists and objects.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._num_values = 0
        self._num_groups = 0

    def whole(self) -> Any:
        value, pos = self._value(self._skip(0), 0)
        if (pos := self._skip(pos)) != len(self._text):
            raise json.JSONDecodeError("Extra data", self._text, pos)
        return value

    def _skip(self, pos: int) -> int:
        found = _SPACE.match(self._text, pos)
        return pos if found is None else found.end()

    def _count(self, num: int) -> None:
        self._num_values += num
        if self._num_values > MAX_VALUES:
            _too_many(MAX_VALUES, "values")

    def _value(self, pos: int, depth: int) -> tuple[Any, int]:
        self._count(1)
        char = self._text[pos : pos + 1]
        if char == '"':
            return self._string(pos + 1)
        if char in ("{", "["):
            if depth == MAX_DEPTH:
                _too_deep()
            self._num_groups += 1
            if self._num_groups > MAX_GROUPS:
                _too_many(MAX_GROUPS, "lists and objects")
            return (self._object if char == "{" else self._list)(pos + 1, depth + 1)
        if char in _WORDS:
            word, value = _WORDS[char]
            if self._text.startswith(word, pos):
                return value, pos + len(word)
        return self._number(pos)

    def _number(self, pos: int) -> tuple[int | float, int]:
        found = _NUMBER.match(self._text, pos)
        if found is None:
            for name in ("NaN", "Infinity", "-Infinity"):
                if self._text.startswith(name, pos):
                    _constant(name)
            raise json.JSONDecodeError("Expecting value", self._text, pos)
        whole, fraction, exponent = found.groups()
        if fraction or exponent:
            return float(found.group()), found.end()
        return int(whole), found.end()

    def _list(self, pos: int, depth: int) -> tuple[list[Any], int]:
        out: list[Any] = []
        pos = self._skip(pos)
        if self._text[pos : pos + 1] == "]":
            return out, pos + 1
        while True:
            pos = self._numbers(pos, out)
            value, pos = self._value(pos, depth)
            out.append(value)
            pos = self._skip(pos)
            char = self._text[pos : pos + 1]
            if char == "]":
                return out, pos + 1
            if char != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", self._text, pos)
            pos = self._skip(pos + 1)

    def _numbers(self, pos: int, out: list[Any]) -> int:
        """Read a run of numbers at `pos`, if there is one, all but the last; prompts of token ids are such runs."""
        while (found := _NUMBERS.match(self._text, pos, pos + AT_ONCE)) is not None:
            run = found.group().rstrip(", \t\n\r")
            self._count(run.count(",") + 1)
            try:
                out.extend(json.loads(f"[{run}]"))
            except json.JSONDecodeError as error:
                raise json.JSONDecodeError(error.msg, self._text, pos + error.pos - 1) from None
            pos = found.end()
        return pos

    def _object(self, pos: int, depth: int) -> tuple[dict[str, Any], int]:
        out: dict[str, Any] = {}
        pos = self._skip(pos)
        if self._text[pos : pos + 1] == "}":
            return out, pos + 1
        while True:
            if self._text[pos : pos + 1] != '"':
                message = "Expecting property name enclosed in double quotes"
                raise json.JSONDecodeError(message, self._text, pos)
            self._count(1)
            key, pos = self._string(pos + 1)
            pos = self._skip(pos)
            if self._text[pos : pos + 1] != ":":
                raise json.JSONDecodeError("Expecting ':' delimiter", self._text, pos)
            value, pos = self._value(self._skip(pos + 1), depth)
            if key in out:
                _given_twice(key)
            out[key] = value
            pos = self._skip(pos)
            char = self._text[pos : pos + 1]
            if char == "}":
                return out, pos + 1
            if char != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", self._text, pos)
            pos = self._skip(pos + 1)

    def _string(self, pos: int) -> tuple[str, int]:
        """The string whose first character is at `pos`, and the place behind its end."""
        text = self._text
        end = text.find('"', pos, pos + AT_ONCE)
        if end != -1 and text.find("\\", pos, end) == -1:
            return _scan(text, pos, True)
        parts: list[str] = []
        while True:
            found = _STRING_PART.match(text, pos, pos + AT_ONCE)
            part = "" if found is None else found.group()
            ended = text[pos + len(part) : pos + len(part) + 1] == '"'
            if not ended and len(part) > 12 and (half := _HIGH_HALF.search(part)) is not None:
                part = part[: half.start()]  # its other half comes with the next part
            if not ended and not part:
                return _scan(text, pos, True)  # which says what is wrong here
            parts.append(_scan(part + '"', 0, True)[0] if "\\" in part else part)
            pos += len(part)
            if ended:
                return "".join(parts), pos + 1
