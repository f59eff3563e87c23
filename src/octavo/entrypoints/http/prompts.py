"""The `prompt` field of a completion: text, token ids, or a list of either.

Promises: one list of prompts in the order sent, or a `ClientError` that says which entry is wrong and why;
a wrong number is named, never narrowed or rounded (API-05).
Does not know: the vocabulary or the context length.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from octavo.base.errors import ClientError
from octavo.base.numbers import whole
from octavo.http.body import json_kind

Prompt = str | list[int]
_SHAPE = "prompt must be a string, a list of strings, a list of token ids, or a list of such lists"


def split_prompts(prompt: object, check_number: Callable[[int], None]) -> list[Prompt]:
    """The prompts of one request; raises `ClientError`.

    `check_number` is told how many there are before anything looks at them, and may refuse (F80).
    """
    if isinstance(prompt, str):
        check_number(1)
        return [prompt]
    if not isinstance(prompt, list):
        raise ClientError(f"{_SHAPE}, got {json_kind(prompt)}", param="prompt", code="invalid_type")
    if not prompt:
        raise ClientError("prompt must not be empty", param="prompt")
    first = prompt[0]
    check_number(len(prompt) if isinstance(first, str | list) else 1)
    if isinstance(first, str | list):
        return [_one(each, first, i) for i, each in enumerate(prompt)]
    return [token_ids(prompt, "prompt")]


def _one(each: object, first: object, place: int) -> Prompt:
    where = f"prompt[{place}]"
    if isinstance(first, str):
        if not isinstance(each, str):
            raise ClientError(f"{where} must be a string as prompt[0] is, got {json_kind(each)}", param=where)
        return each
    if not isinstance(each, list):
        raise ClientError(f"{where} must be a list of token ids as prompt[0] is, got {json_kind(each)}", param=where)
    return token_ids(each, where)


def token_ids(given: list[Any], where: str) -> list[int]:
    """The ids as integers; raises `ClientError` for an entry that is none (2.0 is one; true, 1.5 and "1" are not)."""
    kinds = list(map(type, given))
    others = set(kinds) - {int, float}
    if float not in kinds and not others:
        return given
    if not others:
        with suppress(ValueError, OverflowError):  # infinities, which are named below
            if (numbers := list(map(int, given))) == given:
                return numbers
    end = min(map(kinds.index, others), default=len(given))
    raise _no_id(given, next((i for i, each in enumerate(given[:end]) if whole(each) is None), end), where)


def _no_id(given: list[Any], place: int, where: str) -> ClientError:
    each = given[place]
    shown = repr(each) if isinstance(each, float) else json_kind(each)
    return ClientError(f"{where}[{place}] must be a token id, got {shown}", param=where, code="invalid_type")
