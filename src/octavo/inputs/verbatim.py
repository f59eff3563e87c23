"""Text that stands for JSON but is none, such as the arguments of a call that a model broke off.

Promises: a template that prints it, also through `tojson` and also inside an object, prints it as it is.
Does not know: templates or messages.
"""

import json
from typing import Any


class Verbatim(str):
    """A string that `tojson` does not quote."""

    __slots__ = ()


def dumps(value: Any, **options: Any) -> str:
    """`json.dumps`, with each `Verbatim` in `value` printed as it is."""
    found: list[Verbatim] = []
    text = json.dumps(_lifted(value, found), **options)
    for place, raw in enumerate(found):
        text = text.replace(json.dumps(_stand_in(place), ensure_ascii=True), raw)
    return text


def _lifted(value: Any, found: list[Verbatim]) -> Any:
    """`value` with a stand-in for each `Verbatim`, which is put into `found`."""
    if isinstance(value, Verbatim):
        found.append(value)
        return _stand_in(len(found) - 1)
    if isinstance(value, dict):
        return {key: _lifted(item, found) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_lifted(item, found) for item in value]
    return value


def _stand_in(place: int) -> str:
    return f"octavo:verbatim:{place}:7f3a9c"
