"""Calls side by side, some of which never return."""

import threading
import time

import numpy as np
import pytest

from octavo.features.transfer.data.call_pool import CallPool


@pytest.fixture
def pool():
    made = CallPool(3, "test-crew")
    yield made
    made.stop()


def test_what_calls_give_is_taken_with_their_numbers_on_the_caller_s_thread(pool):
    got, here = {}, threading.current_thread()

    def take(number, value):
        assert threading.current_thread() is here
        got[number] = value

    pool.each((lambda i=i: i * i for i in range(50)), take, 5.0)
    assert got == {i: i * i for i in range(50)} and pool.is_free


def test_no_more_calls_are_asked_for_than_can_be_made(pool):
    asked, done = [], []

    def calls():
        for i in range(20):
            asked.append(i)
            yield lambda i=i: i

    def take(number, _):
        assert len(asked) - len(done) <= 3
        done.append(number)

    pool.each(calls(), take, 5.0)
    assert len(done) == 20


def test_a_call_that_does_not_return_is_given_up_and_the_crew_is_not_free_until_it_has(pool):
    gate, got = threading.Event(), []
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
        pool.each([lambda: 1, lambda: gate.wait(20), lambda: gate.wait(20)], lambda *it: got.append(it), 0.2)
    assert time.monotonic() - began < 2 and got == [(0, 1)] and not pool.is_free
    gate.set()
    end = time.monotonic() + 5
    while not pool.is_free:
        assert time.monotonic() < end
        time.sleep(0.005)
    assert got == [(0, 1)]  # what came late was for nobody


def test_an_error_gives_up_the_rest_and_what_had_not_begun_never_does(pool):
    gate, begun = threading.Event(), []

    def fail():
        raise ValueError("no")

    def hang():
        begun.append(1)
        gate.wait(20)

    with pytest.raises(ValueError, match="no"):
        pool.each([fail, hang, hang, hang, hang], lambda *_: None, 5.0)
    count = len(begun)
    gate.set()
    pool.each([lambda: 1] * 3, lambda *_: None, 5.0)
    assert len(begun) - count <= 3  # those that threads had taken already


def test_a_crew_keeps_nothing_of_what_it_did(pool):
    import gc
    import weakref

    row = np.zeros(10)
    watch = weakref.ref(row)
    pool.each([lambda row=row: None], lambda *_: None, 5.0)
    del row
    end = time.monotonic() + 5
    while watch() is not None:
        gc.collect()
        assert time.monotonic() < end
        time.sleep(0.005)
