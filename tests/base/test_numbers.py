"""What counts as an integer, and when two JSON values are the same (F12, F91)."""

import math
from fractions import Fraction

import numpy as np
import pytest

from octavo.base.numbers import same_json, whole


@pytest.mark.parametrize("value", [2, 2.0, np.int8(2), np.float32(2), np.float64(2), Fraction(4, 2)])
def test_whole_numbers_of_every_kind(value: object) -> None:
    assert whole(value) == 2 and type(whole(value)) is int


@pytest.mark.parametrize(
    "value", [True, False, 2.5, math.inf, -math.inf, math.nan, "2", None, [2], np.float32(2.5), 1j]
)
def test_what_is_no_integer(value: object) -> None:
    assert whole(value) is None


def test_large_floats_are_the_numbers_they_are() -> None:
    assert whole(2.0**70) == 2**70 and whole(1e300) == int(1e300)


@pytest.mark.parametrize(
    ("a", "b"), [(True, 1), (1.0, True), (False, 0), (0.0, False), ([True], [1]), ({"a": False}, {"a": 0}), ("", False)]
)
def test_true_is_not_one_and_false_is_not_zero(a: object, b: object) -> None:
    assert not same_json(a, b) and not same_json(b, a)


@pytest.mark.parametrize(
    ("a", "b"), [(1, 1.0), (True, True), (None, None), ([1, {"a": 0}], [1.0, {"a": 0.0}]), ({}, {}), ("x", "x")]
)
def test_equal_values_are_the_same(a: object, b: object) -> None:
    assert same_json(a, b)


@pytest.mark.parametrize(("a", "b"), [([1], [1, 2]), ({"a": 1}, {"b": 1}), ([], {}), (1, 2), ("a", ["a"])])
def test_others_are_not(a: object, b: object) -> None:
    assert not same_json(a, b)
