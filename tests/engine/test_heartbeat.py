"""What the front makes of an engine's beats: rest, work and long steps are well, silence is not (EXE-3, OPS-11)."""

import pytest

from octavo.engine.heartbeat import HEARTBEAT_S, LATE_S, STEPS_OF, Heartbeat, Pulse

LIMIT_S = 10.0


class Bedside:
    """A pulse under a clock of its own.

    Owns: the time, and the engine's figures.
    """

    def __init__(self):
        self.now_s, self.progress, self.cpu_s = 0.0, 0, 0.0
        self.heartbeat = None
        self.pulse = Pulse(lambda: self.now_s)

    def live(self, seconds, *, heartbeats=True, resting=False, steps=0, cores=0.0, healthy=True):
        """So many seconds of looks every `HEARTBEAT_S`, and of an engine that does this meanwhile."""
        for _ in range(round(seconds / HEARTBEAT_S)):
            self.now_s += HEARTBEAT_S
            self.progress += steps
            self.cpu_s += cores * HEARTBEAT_S
            if heartbeats:
                self.heartbeat = Heartbeat(self.now_s, resting, self.progress, self.cpu_s, healthy)
            self.pulse.feel(self.heartbeat)
        return self.pulse


def test_an_engine_that_says_nothing_of_itself_is_believed():
    assert not Bedside().live(100, heartbeats=False).late


@pytest.mark.parametrize(
    "well",
    [{"resting": True}, {"steps": 1}, {"cores": 1.0}, {"cores": 0.06}],
    ids=["rest", "steps", "compute", "a little"],
)
def test_rest_steps_and_a_step_that_computes_are_signs_of_life(well):
    """F30: what is measured is progress, not the time that a step takes."""
    bed = Bedside()
    bed.live(60, **well)
    assert not bed.pulse.late
    assert bed.pulse.over(LIMIT_S) is None


@pytest.mark.parametrize("resting", [False, True])
def test_silence_is_late_within_two_seconds_of_the_beat_that_did_not_come(resting):
    """F30: a process that is frozen, at work or idle."""
    bed = Bedside()
    bed.live(5, resting=resting, steps=1)
    missed_s = bed.now_s + HEARTBEAT_S
    while not bed.live(HEARTBEAT_S, heartbeats=False).late:
        assert bed.now_s < 60
    assert bed.now_s - missed_s <= 2.0
    assert bed.pulse.over(LIMIT_S) is None
    bed.live(LIMIT_S, heartbeats=False)
    assert "said nothing" in bed.pulse.over(LIMIT_S)
    assert bed.pulse.over(0.0) is None


def test_a_step_that_waits_for_ever_is_late_although_its_process_beats():
    """F30: a hung step; a thread that wakes now and then does not count."""
    bed = Bedside()
    bed.live(5, steps=1)
    bed.live(LATE_S + HEARTBEAT_S, cores=0.01)
    assert bed.pulse.late
    bed.live(LIMIT_S, cores=0.01)
    assert "got nowhere" in bed.pulse.over(LIMIT_S)


def test_a_step_that_computes_for_ever_is_given_up_too():
    bed = Bedside()
    bed.live(LIMIT_S * (STEPS_OF - 1), cores=1.0)
    assert bed.pulse.over(LIMIT_S) is None and not bed.pulse.late
    bed.live(2 * LIMIT_S, cores=1.0)
    assert "has not ended" in bed.pulse.over(LIMIT_S)


def test_an_engine_that_goes_on_is_well_again():
    """F30: SIGCONT before the limit."""
    bed = Bedside()
    bed.live(5, steps=1)
    bed.live(LIMIT_S - 2, heartbeats=False)
    assert bed.pulse.late
    bed.live(HEARTBEAT_S, steps=1)
    assert not bed.pulse.late and bed.pulse.over(LIMIT_S) is None


def test_time_in_which_the_front_did_not_run_is_not_held_against_the_engine():
    """Both were stopped (Ctrl-Z), or the machine slept; the engine's next beat comes a moment later."""
    bed = Bedside()
    bed.live(5, steps=1)
    bed.now_s += 3600
    bed.pulse.feel(bed.heartbeat)
    assert not bed.pulse.late and bed.pulse.over(LIMIT_S) is None


def test_an_engine_without_a_worker_is_given_up_at_once():
    bed = Bedside()
    bed.live(HEARTBEAT_S, resting=True, healthy=False)
    assert bed.pulse.late
    assert "worker" in bed.pulse.over(0.0)
