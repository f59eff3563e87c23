"""The loop handles messages in order, idles without spinning, ticks at deadlines, and reports its death once."""

import threading
import time

import pytest

from octavo.base.errors import EngineDead, OctavoError
from octavo.base.outputs import EngineOutputs, RequestDelta
from octavo.base.params import SamplingParams
from octavo.base.requests import EngineRequest
from octavo.engine.client import InprocClient


class FakeCore:
    """Answers each request in one step.

    Owns: what it was told, in order.
    """

    def __init__(self, deadline=None, fail=False):
        self.told, self.todo, self.steps, self.stops = [], [], 0, 0
        self.deadline, self.fail, self.settles = deadline, fail, 0

    def add(self, req):
        self.told.append(("add", req.request_id))
        self.todo.append(req.request_id)

    def abort(self, ids):
        self.told.append(("abort", *ids))

    def call(self, method, args):
        self.told.append(("call", method))
        if method == "bad":
            raise OctavoError("no such call")
        return args

    @property
    def busy(self):
        return bool(self.todo)

    def next_deadline(self):
        return None if self.deadline is None else time.monotonic() + self.deadline

    def step(self):
        self.steps += 1
        if self.fail and self.todo:
            raise RuntimeError("the device is on fire")
        if not self.todo:
            return None
        return EngineOutputs(deltas=(RequestDelta(request_id=self.todo.pop(0)),))

    def settle(self):
        self.settles += 1

    def stop(self):
        self.stops += 1


def request(name):
    return EngineRequest(request_id=name, prompt_token_ids=(1,), sampling=SamplingParams())


class Front:
    """Collects what a client delivers."""

    def __init__(self, core):
        self.got, self.deaths, self.event = [], [], threading.Event()
        self.client = InprocClient(core)
        self.client.start(self.take, self.deaths.append)

    def take(self, outputs):
        self.got += [d.request_id for d in outputs.deltas]
        self.event.set()

    def wait_for(self, count):
        end = time.monotonic() + 5
        while len(self.got) < count and time.monotonic() < end:
            time.sleep(0.002)
        assert len(self.got) == count


def test_messages_are_handled_in_order_and_answers_come_back():
    core = FakeCore()
    front = Front(core)
    front.client.submit((request("a"), request("b")))
    front.client.abort(("b", "c"))
    assert front.client.call("echo", x=1) == {"x": 1}
    front.wait_for(2)
    assert front.got == ["a", "b"]
    assert core.told == [("add", "a"), ("add", "b"), ("abort", "b", "c"), ("call", "echo")]
    front.client.close()
    assert core.stops == 1


def test_an_idle_loop_does_not_spin():
    core = FakeCore()
    front = Front(core)
    time.sleep(0.3)
    assert core.steps == 0
    front.client.close()


def test_a_deadline_makes_an_idle_loop_tick():
    core = FakeCore(deadline=0.02)
    front = Front(core)
    time.sleep(0.5)
    front.client.close()
    assert 5 <= core.steps <= 40


def test_a_failing_call_does_not_end_the_loop():
    front = Front(FakeCore())
    with pytest.raises(OctavoError, match="no such call"):
        front.client.call("bad")
    assert front.client.call("echo") == {}
    front.client.close()


def test_a_failing_core_dies_once_and_says_why():
    core = FakeCore(fail=True)
    front = Front(core)
    front.client.submit((request("a"),))
    end = time.monotonic() + 5
    while not front.deaths and time.monotonic() < end:
        time.sleep(0.002)
    assert len(front.deaths) == 1
    assert isinstance(front.deaths[0], EngineDead)
    assert "on fire" in str(front.deaths[0])
    assert not front.client.alive()
    with pytest.raises(EngineDead, match="on fire"):
        front.client.submit((request("b"),))
    assert core.stops == 1 and core.settles == 0
    front.client.close()


def test_a_clean_end_lets_parts_settle_first():
    core = FakeCore()
    Front(core).client.close()
    assert core.settles == core.stops == 1


def test_a_closed_client_refuses_work_and_closes_twice():
    front = Front(FakeCore())
    front.client.close()
    front.client.close()
    with pytest.raises(EngineDead, match="closed"):
        front.client.submit((request("a"),))
    front.client.abort(("a",))
