"""What counts as an integer when people and programs send numbers.

Promises: JSON knows one kind of number, so 2.0 is the integer 2 wherever an integer is asked for; 2.5, true and "2" are none.
Does not know: ranges or fields.
"""

import operator
from numbers import Real
from typing import Any


def whole(value: Any) -> int | None:
    """`value` as an integer of any kind, numpy's and whole floats included; None when it is not one.

    Infinities and NaN are none; a float is taken for exactly the number it is, however large.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        pass
    if not isinstance(value, Real):
        return None
    number = float(value)
    return int(number) if number.is_integer() else None


def same_json(a: object, b: object) -> bool:
    """Whether two JSON values are the same: 1 and 1.0 are; true and 1, false and 0 are not, also not inside lists."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same_json, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_json(a[key], b[key]) for key in a)
    return a == b
