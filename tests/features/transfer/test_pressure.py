"""A slow tier gets less, in proportion, and all again when it is quick (TIR-17)."""

import pytest

from octavo.features.transfer.control.pressure import LEAST_BYTES, Pressure

MANY = 10 * LEAST_BYTES


def admitted(pressure, count=100):
    return sum(pressure.admits() for _ in range(count))


def test_all_goes_while_the_tier_is_quick():
    pressure = Pressure(high=10e-9)
    assert admitted(pressure) == 100
    pressure.measured(MANY, 9e-9 * MANY)
    assert admitted(pressure) == 100 and not pressure.thinned


@pytest.mark.parametrize(("times", "share"), [(2, 50), (4, 25), (10, 10)])
def test_above_the_mark_the_share_is_the_mark_s_of_the_average(times, share):
    pressure = Pressure(high=10e-9)
    pressure.measured(MANY, times * 10e-9 * MANY)
    assert pressure.thinned and admitted(pressure) == pytest.approx(share, abs=1)
    assert pressure.num_dropped == pytest.approx(100 - share, abs=1)


def test_between_the_marks_it_stays_as_it_was():
    pressure = Pressure(high=10e-9, low=5e-9)
    pressure.measured(MANY, 8e-9 * MANY)
    assert not pressure.thinned
    pressure.measured(MANY, 100e-9 * MANY)
    while pressure.average > 7e-9:
        pressure.measured(MANY, 6e-9 * MANY)
    assert pressure.thinned and admitted(pressure) == 100  # thinned to all of it: the average is below the high mark
    while pressure.average > 5e-9:
        pressure.measured(MANY, 1e-9 * MANY)
    pressure.measured(MANY, 1e-9 * MANY)
    assert not pressure.thinned


def test_a_reset_forgets_the_average_and_keeps_the_counters():
    pressure = Pressure(high=10e-9)
    pressure.measured(MANY, 1e-6 * MANY)
    admitted(pressure)
    dropped = pressure.num_dropped
    pressure.reset()
    assert not pressure.average and admitted(pressure) == 100 and pressure.num_dropped == dropped > 0


def test_small_stores_say_little():
    pressure = Pressure(high=10e-9)
    pressure.measured(100, 1e-3)  # a slow call, not a slow tier
    assert not pressure.thinned


def test_what_measures_nothing_counts_nothing():
    pressure = Pressure(high=10e-9)
    pressure.measured(0, 5.0)
    pressure.measured(10, -1.0)
    assert not pressure.average


@pytest.mark.parametrize(("high", "low"), [(0.0, None), (1.0, 2.0), (1.0, 0.0), (-1.0, None)])
def test_marks_must_be_a_range(high, low):
    with pytest.raises(ValueError, match="low mark"):
        Pressure(high, low)
