"""Calls side by side, some of which never return."""

import threading
import time

import numpy as np
import pytest

from octavo.features.transfer.data.crew import Crew


@pytest.fixture
def crew():
    made = Crew(3, "test-crew")
    yield made
    made.stop()


def test_what_calls_give_is_taken_with_their_numbers_on_the_caller_s_thread(crew):
    got, here = {}, threading.current_thread()

    def take(number, value):
        assert threading.current_thread() is here
        got[number] = value

    crew.each((lambda i=i: i * i for i in range(50)), take, 5.0)
    assert got == {i: i * i for i in range(50)} and crew.is_free


def test_no_more_calls_are_asked_for_than_can_be_made(crew):
    asked, done = [], []

    def calls():
        for i in range(20):
            asked.append(i)
            yield lambda i=i: i

    crew.each(calls(), lambda number, _: done.append(number) or check(), 5.0)

    def check():
        assert len(asked) - len(done) <= 3


def test_a_call_that_does_not_return_is_given_up_and_the_crew_is_not_free_until_it_has(crew):
    gate, got = threading.Event(), []
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
        crew.each([lambda: 1, lambda: gate.wait(20), lambda: gate.wait(20)], lambda *it: got.append(it), 0.2)
    assert time.monotonic() - began < 2 and got == [(0, 1)] and not crew.is_free
    gate.set()
    end = time.monotonic() + 5
    while not crew.is_free:
        assert time.monotonic() < end
        time.sleep(0.005)
    assert got == [(0, 1)]  # what came late was for nobody


def test_an_error_gives_up_the_rest_and_what_had_not_begun_never_does(crew):
    gate, begun = threading.Event(), []

    def fail():
        raise ValueError("no")

    def hang():
        begun.append(1)
        gate.wait(20)

    with pytest.raises(ValueError, match="no"):
        crew.each([fail, hang, hang, hang, hang], lambda *_: None, 5.0)
    count = len(begun)
    gate.set()
    crew.each([lambda: 1] * 3, lambda *_: None, 5.0)
    assert len(begun) - count <= 3  # those that threads had taken already


def test_a_crew_keeps_nothing_of_what_it_did(crew):
    import gc
    import weakref

    row = np.zeros(10)
    watch = weakref.ref(row)
    crew.each([lambda row=row: None], lambda *_: None, 5.0)
    del row
    end = time.monotonic() + 5
    while watch() is not None:
        gc.collect()
        assert time.monotonic() < end
        time.sleep(0.005)
