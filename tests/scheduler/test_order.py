"""Who is next, and who gives way."""

import random

import pytest

from octavo.base.errors import ConfigError
from octavo.base.params import SamplingParams
from octavo.base.requests import EngineRequest
from octavo.base.types import RequestState
from octavo.kvcache.hashing import HashChain, make_hasher
from octavo.scheduler.order import Order, make_order
from octavo.scheduler.request import Request
from tests.simulate.world import Clock


def make(name: str, priority: int = 0) -> Request:
    source = EngineRequest(request_id=name, prompt_token_ids=(1, 2), sampling=SamplingParams(), priority=priority)
    chain = HashChain(make_hasher("sha256"), 4, source)
    return Request(source, chain, block_size=4, max_model_len=100, now=0.0)


def names(requests: object) -> str:
    return "".join(req.request_id for req in requests)  # type: ignore[attr-defined]


def admit(order: Order, slot: int) -> Request:
    req = order.peek()
    assert req is not None
    order.admit()
    req.move(RequestState.WAITING)
    req.run(slot, 1, 0.0)
    return req


def test_fcfs_serves_in_order_of_arrival_and_the_last_admitted_gives_way() -> None:
    """SCH-1, SCH-12."""
    order = make_order("fcfs", clock=Clock())
    for name in "abcd":
        order.push(make(name, priority=-ord(name)))
    for slot in range(3):
        admit(order, slot)
    assert names(order.running) == "abc" and order.victim().request_id == "c" and order.num_waiting == 1


def test_a_preempted_request_stands_before_everybody_who_came_later() -> None:
    """SCH-30."""
    order = make_order("fcfs", clock=Clock())
    for name in "abcd":
        order.push(make(name))
    admit(order, 0)
    req = admit(order, 1)
    order.remove(req)
    req.preempt(0.0)
    order.push(req)
    assert names(order.waiting()) == "bcd" and names(order.running) == "a"


def test_those_skipped_do_not_hold_up_those_behind_and_come_back_in_their_place() -> None:
    """SCH-15."""
    order = make_order("fcfs", clock=Clock())
    for name in "abcd":
        order.push(make(name))
    order.skip()
    order.skip()
    assert admit(order, 0).request_id == "c"
    assert order.num_waiting == 3 and names(order.sift(5, lambda _: None)) == "d"
    order.recall()
    assert names(order.waiting()) == "abd"


def test_priority_serves_the_lowest_value_then_the_earlier_arrival() -> None:
    """SCH-1; the running ones are served in that order too, and the worst gives way."""
    order = make_order("priority", clock=Clock())
    for name, priority in zip("abcde", (2, 0, 1, 0, 1), strict=True):
        order.push(make(name, priority))
    assert names(order.waiting()) == "bdcea"
    for slot in range(5):
        admit(order, slot)
    late = make("f", 0)
    order.push(late)
    admit(order, 5)
    assert names(order.running) == "bdfcea" and order.victim().request_id == "a"


def test_aging_lets_a_low_priority_request_pass_those_that_come_later() -> None:
    """SCH-40: with aging every two seconds, six seconds of waiting make up for a priority of 3."""
    clock = Clock()
    order = make_order("priority", aging_s=2.0, clock=clock)
    order.push(make("a", 3))
    for name, at in (("b", 3.0), ("c", 6.9), ("d", 7.1)):
        clock.now = at
        order.push(make(name, 0))
    assert names(order.waiting()) == "bcad"


def test_without_aging_a_low_priority_request_waits_for_all_others() -> None:
    clock = Clock()
    order = make_order("priority", clock=clock)
    order.push(make("a", 3))
    clock.now = 1e6
    order.push(make("b", 0))
    assert names(order.waiting()) == "ba"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_any_mix_of_changes_gives_what_a_sorted_list_gives(policy: str) -> None:
    """The queue with its dead front against the plain way."""
    rng = random.Random(3)
    order = make_order(policy, clock=Clock())
    waiting: list[Request] = []
    skipped: list[Request] = []
    for i in range(6000):
        what = rng.random()
        if what < 0.45 or not waiting:
            req = make(f"{i} ", rng.randrange(4))
            order.push(req)
            waiting.append(req)
        elif what < 0.8:
            assert order.pop() is waiting.pop(0)
        elif what < 0.9:
            order.skip()
            skipped.append(waiting.pop(0))
        elif what < 0.95:
            gone = rng.choice(waiting + skipped)
            order.remove(gone)
            (waiting if gone in waiting else skipped).remove(gone)
        else:
            order.recall()
            waiting, skipped = waiting + skipped, []
        waiting.sort(key=lambda req: req.key)
        assert order.num_waiting == len(waiting) + len(skipped)
        assert order.peek() is (waiting[0] if waiting else None)
    assert list(order.waiting()) == waiting + skipped


def test_removing_somebody_who_is_in_no_queue_changes_nothing() -> None:
    order = make_order("fcfs", clock=Clock())
    order.push(make("a"))
    order.remove(make("b"))
    assert order.num_waiting == 1


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="'lifo' is unknown; use 'fcfs' or 'priority'"):
        make_order("lifo", clock=Clock())
