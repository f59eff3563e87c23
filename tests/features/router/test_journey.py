"""The way of one request over servers that fail (PDX-12)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.features.router.journey import MAX_FAILURES, Failure, Journey, Leg, may_retry


def picker(**names):
    """Servers by leg; the first that is not left out."""

    def pick(leg, without):
        return next((n for n in names.get(leg.value, ()) if n not in without), None)

    return pick


FLEET = picker(prefill=["p1", "p2"], decode=["d1", "d2"], whole=["w1", "d1", "d2"])


def test_prefill_then_decode_with_the_parameters():
    way = Journey(FLEET, disagg=True)
    assert way.next() == (Leg.PREFILL, "p1")
    way.prefilled({"lease": 1})
    assert way.next() == (Leg.DECODE, "d1")
    assert way.params == {"lease": 1} and way.fell_back_from is None


def test_what_is_not_handed_over_goes_whole():
    way = Journey(FLEET, disagg=False)
    assert way.next() == (Leg.WHOLE, "w1")
    assert way.params is None and way.fell_back_from is None


def test_another_prefill_server_is_asked_then_the_request_goes_whole():
    way = Journey(FLEET, disagg=True)
    seen = []
    for _ in range(3):
        seen.append(way.next())
        way.failed(Failure.LOST)
    assert seen == [(Leg.PREFILL, "p1"), (Leg.PREFILL, "p2"), (Leg.WHOLE, "w1")]
    assert way.fell_back_from is Leg.PREFILL


def test_another_decode_server_gets_the_same_parameters_then_the_request_goes_whole_without_them():
    way = Journey(FLEET, disagg=True)
    way.next()
    way.prefilled({"lease": 1})
    assert way.next() == (Leg.DECODE, "d1")
    way.failed(Failure.LOST)
    assert way.next() == (Leg.DECODE, "d2") and way.params == {"lease": 1}
    way.failed(Failure.STATUS)
    assert way.next() == (Leg.WHOLE, "w1") and way.params is None
    assert way.fell_back_from is Leg.DECODE


def test_nobody_for_prefill_goes_whole_at_once():
    way = Journey(picker(decode=["d1"], whole=["d1"]), disagg=True)
    assert way.next() == (Leg.WHOLE, "d1")
    assert way.fell_back_from is Leg.PREFILL and way.num_failures == 0


def test_a_prefill_server_that_keeps_nothing_makes_the_request_go_whole():
    way = Journey(FLEET, disagg=True)
    way.next()
    way.prefilled(None)
    assert way.next() == (Leg.WHOLE, "w1")


@pytest.mark.parametrize(
    ("failure", "again"), [(f, f in (Failure.LOST, Failure.STATUS, Failure.MALFORMED)) for f in Failure]
)
def test_a_server_that_is_gone_or_slow_is_not_asked_for_another_purpose(failure, again):
    way = Journey(picker(prefill=["p"], decode=["d"], whole=["d"]), disagg=True)
    way.next()
    way.prefilled({"lease": 1})
    assert way.next() == (Leg.DECODE, "d")
    way.failed(failure)
    assert way.next() == ((Leg.WHOLE, "d") if again else None)


def test_a_request_that_ends_its_servers_does_not_end_all_of_them():
    way = Journey(picker(whole=[f"w{i}" for i in range(9)]), disagg=False)
    asked = 0
    while way.next() is not None:
        asked += 1
        way.failed(Failure.LOST)
    assert asked == MAX_FAILURES


def test_nothing_is_retried_once_the_answer_has_begun_and_no_refusal_ever():
    assert all(may_retry(failure, begun=False) for failure in Failure)
    assert not any(may_retry(failure, begun=True) for failure in Failure)
    assert [s for s in range(200, 600) if may_retry(s, begun=False)] == [502, 503, 504]
    assert not any(may_retry(s, begun=True) for s in range(200, 600))


@given(
    st.lists(st.sampled_from([None, "params", *Failure]), max_size=20),
    st.booleans(),
    st.sets(st.integers(0, 3)), st.sets(st.integers(0, 3)), st.sets(st.integers(0, 3)),
)  # fmt: skip
def test_every_way_ends_and_asks_nobody_twice_for_the_same(events, disagg, prefill, decode, whole):
    names = {"prefill": prefill, "decode": decode, "whole": whole}
    way = Journey(picker(**{k: [f"{k[0]}{i}" for i in sorted(v)] for k, v in names.items()}), disagg=disagg)
    seen = []
    for event in events:
        step = way.next()
        if step is None:
            break
        seen.append(step)
        assert (way.params is not None) == (step[0] is Leg.DECODE)
        if isinstance(event, Failure):
            way.failed(event)
        elif step[0] is Leg.PREFILL:
            way.prefilled({"lease": 1} if event else None)
        else:
            break  # it was answered
    assert len(seen) == len(set(seen)) <= 2 + MAX_FAILURES
    legs = [leg for leg, _ in seen]
    assert legs == sorted(legs, key=list(Leg).index)
