"""When a server may be given requests (PDX-12)."""

from hypothesis import given
from hypothesis import strategies as st

from octavo.features.router.health import InstanceHealth, InstanceState


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def health(failures=2):
    clock = Clock()
    return InstanceHealth(failures, clock), clock


def test_a_server_is_used_from_its_first_good_check_on():
    one, _ = health()
    assert one.state is InstanceState.UNKNOWN and not one.usable
    one.passed()
    assert one.state is InstanceState.UP and one.usable and one.why == ""


def test_one_slow_check_takes_no_server_away_but_several_in_a_row_do():
    one, _ = health(3)
    one.passed()
    assert [one.failed("slow") for _ in range(2)] == [False, False]
    assert one.usable
    one.passed()
    assert [one.failed("slow") for _ in range(2)] == [False, False]
    assert one.usable
    assert one.failed("slow") is True
    assert one.state is InstanceState.DOWN and one.why == "slow"
    assert one.failed("slow") is False  # what ran there was given up already
    one.passed()
    assert one.usable


def test_a_refused_check_is_down_at_once_and_gives_up_what_runs_after_as_many_as_others():
    one, _ = health(2)
    one.passed()
    assert one.failed("refused", certain=True) is False
    assert one.state is InstanceState.DOWN
    assert one.failed("refused", certain=True) is True


def test_a_request_that_finds_nobody_marks_it_down_until_a_good_check():
    one, _ = health()
    one.passed()
    one.refused("nobody there")
    assert one.state is InstanceState.DOWN
    one.passed()
    assert one.usable


def test_a_draining_server_is_passed_over_and_not_called_down():
    one, clock = health()
    one.passed()
    one.drains(5.0)
    assert one.state is InstanceState.DRAINING and not one.usable
    one.passed()  # it is alive, which changes nothing
    assert one.state is InstanceState.DRAINING
    clock.now += 5.0
    assert one.usable


def test_a_server_that_is_down_and_then_says_that_it_drains_is_there():
    one, clock = health()
    one.refused("nobody there")
    one.drains(1.0)
    assert one.state is InstanceState.DRAINING
    clock.now += 2.0
    assert one.usable


@given(st.lists(st.sampled_from(["passed", "failed", "refused check", "refused", "drains", "wait"]), max_size=30))
def test_whatever_happens_a_good_check_brings_it_back_when_it_does_not_drain(events):
    one, clock = health()
    for event in events:
        if event == "passed":
            one.passed()
            assert one.state in (InstanceState.UP, InstanceState.DRAINING)
        elif event == "failed":
            one.failed("x")
        elif event == "refused check":
            one.failed("x", certain=True)
            assert one.state is InstanceState.DOWN
        elif event == "refused":
            one.refused("x")
            assert one.state is InstanceState.DOWN
        elif event == "drains":
            one.drains(3.0)
            assert one.state is InstanceState.DRAINING
        else:
            clock.now += 2.0
        assert one.usable == (one.state is InstanceState.UP)
    clock.now += 10.0
    one.passed()
    assert one.usable
