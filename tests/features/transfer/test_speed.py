"""Speeds from what was seen: the newest counts most."""

import pytest

from octavo.features.transfer.control.speed import Speed


def test_the_first_counts_whole_and_later_ones_a_share():
    speed = Speed(least=10)
    assert speed.per_s == speed.seconds(100) == 0
    speed.seen(1000, 1.0)
    assert speed.per_s == 1000 and speed.seconds(500) == 0.5
    speed.seen(2000, 1.0)
    assert speed.per_s == pytest.approx(1200)
    for _ in range(40):
        speed.seen(2000, 1.0)
    assert speed.per_s == pytest.approx(2000, rel=0.01)


def test_what_was_measured_before_counts_until_more_is_seen():
    speed = Speed(least=10)
    speed.begin(0.0)
    assert speed.per_s == 0
    speed.begin(500.0)
    assert speed.seconds(1000) == 2
    speed.seen(1000, 1.0)
    assert speed.per_s == pytest.approx(600)


def test_what_says_nothing_is_left_out():
    speed = Speed(least=10)
    speed.seen(9, 1.0)
    speed.seen(1000, 0.0)
    speed.seen(1000, -1.0)
    assert speed.per_s == 0
