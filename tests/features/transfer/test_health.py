"""When a tier is left alone, and what the log hears of it (F39)."""

from octavo.features.transfer.data.health import QUIET_S, REST_S, TierHealth


def made():
    now = [0.0]
    return TierHealth("KV tier file:///f", clock=lambda: now[0]), now


def lines(caplog):
    return [record.getMessage() for record in caplog.records]


def test_a_tier_that_failed_rests_for_a_while():
    health, now = made()
    assert not health.rests
    health.failed("no room")
    assert health.rests
    now[0] = REST_S + 0.1
    assert not health.rests


def test_however_often_it_fails_there_is_one_line_and_then_a_count(caplog):
    """F39: 522 lines in 1.3 s."""
    health, now = made()
    for _ in range(500):
        health.failed("no such folder")
    assert lines(caplog) == ["KV tier file:///f: it is left alone for 5 s at a time: no such folder"]
    now[0] = QUIET_S + 1
    health.failed("no such folder")
    assert lines(caplog)[1:] == [
        "KV tier file:///f: it is left alone for 5 s at a time: no such folder (499 more since the last line)"
    ]


def test_that_it_works_again_is_said_and_one_that_comes_and_goes_does_not_fill_the_log(caplog):
    health, _ = made()
    health.worked()
    assert not caplog.records
    for _ in range(100):
        health.failed("gone")
        health.failed("gone")
        health.worked()
    assert lines(caplog) == [
        "KV tier file:///f: it is left alone for 5 s at a time: gone",
        "KV tier file:///f: works again, after 2 failures",
    ]


def test_other_lines_are_counted_by_their_kind(caplog):
    health, now = made()
    for number in range(3):
        health.note("odd", f"{number}.kv is removed")
    health.note("stuck", "it hangs")
    assert lines(caplog) == ["KV tier file:///f: 0.kv is removed", "KV tier file:///f: it hangs"]
    now[0] = QUIET_S + 1
    health.note("odd", "9.kv is removed")
    assert lines(caplog)[-1] == "KV tier file:///f: 9.kv is removed (2 more since the last line)"
    assert not health.rests
