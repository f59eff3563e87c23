"""Phases cover all the time there is, without gaps (F69)."""

import time
from pathlib import Path

from octavo.base.phases import LONGEST_INTERPRETER_S, Phases, process_began_s


def test_phases_follow_each_other_without_a_gap_and_come_in_order():
    times = iter([10.0, 12.5, 13.0, 15.0, 16.0])  # two to enter, one to look, one to enter, one for the sums
    told: list[str] = []
    phases = Phases("a", 9.0, tell=told.append, clock=lambda: next(times))
    phases.enter("b")
    phases.enter("c")
    now = phases.now()
    assert (now.phase, now.seconds, now.total_s) == ("c", 0.5, 4.0)
    phases.enter("a")  # again: its times add up
    seconds = phases.seconds()
    assert list(seconds.items()) == [("a", 2.0), ("b", 2.5), ("c", 2.5)]
    assert sum(seconds.values()) == 16.0 - 9.0
    assert told == ["b", "c", "a"]


def test_a_process_knows_when_it_began(tmp_path: Path):
    now_s = time.monotonic()
    ticks = int((time.clock_gettime(time.CLOCK_BOOTTIME) - 3.0) * 100)
    stat = tmp_path / "stat"
    stat.write_text(f"1 (a) (odd name) S {'0 ' * 18}{ticks} 0 0")
    assert abs(process_began_s(stat) - (now_s - 3.0)) < 1.0


def test_where_the_system_does_not_say_a_process_begins_now(tmp_path: Path):
    """Nor where the process is so old that it did other things before."""
    stat, old = tmp_path / "absent", tmp_path / "old"
    old.write_text(
        f"1 (a) S {'0 ' * 18}{int((time.clock_gettime(time.CLOCK_BOOTTIME) - 2 * LONGEST_INTERPRETER_S) * 100)} 0"
    )
    odd = tmp_path / "odd"
    odd.write_text("1 (a)")
    for file in (stat, old, odd):
        before_s = time.monotonic()
        assert before_s <= process_began_s(file) <= time.monotonic()
