"""One loop for every depth: the flight is filled, the oldest is applied first, late parts come in time."""

import time
from collections import deque

import pytest

from octavo.base.errors import ClientError, OctavoError
from octavo.base.outputs import CacheChanges, EngineOutputs, RequestDelta, StatsSnapshot
from octavo.base.params import SamplingParams
from octavo.base.requests import EngineRequest
from octavo.base.step import PlanPart, StepPlan, StepResult, empty_batch, ragged
from octavo.base.types import FinishReason
from octavo.engine.core import UNFINISHED, EngineCore
from octavo.kvcache.prefix import CacheEvent


class LatePart(PlanPart, frozen=True):
    """A part that needs the tokens of the step before."""

    seen: int


class ScriptedScheduler:
    """Plans `count` steps; every plan says that a late part follows.

    Owns: the numbers of planned and applied steps.
    """

    def __init__(self, count, late=True):
        self.left, self.seq, self.applied, self.late = count, 0, 0, late
        self.added, self.aborted = [], []
        self.unsettled = 0

    def add(self, req):
        if req.request_id == "bad":
            raise ClientError("the id is taken")
        if req.request_id == "bug":
            raise KeyError("oops")
        self.added.append(req.request_id)

    def abort(self, ids):
        self.aborted += ids

    def schedule(self):
        if not self.left:
            return None
        self.left -= 1
        self.seq += 1
        return StepPlan(seq=self.seq, batch=empty_batch(1), late=("LatePart",) if self.late else ())

    def supply(self, plan):
        assert self.applied == plan.seq - 1, "a late part is asked for when every earlier step has been applied"
        return (LatePart(plan.seq),)

    def has_work(self):
        return self.left > 0

    def next_deadline(self):
        return 7.0

    def reset_prefix_cache(self):
        return True

    def pause(self):
        self.left = 0

    def resume(self):
        return None

    def close(self):
        return None

    def settled(self):
        self.unsettled -= self.unsettled > 0
        return not self.unsettled

    def stats(self):
        return StatsSnapshot(seq=self.seq)


class ScriptedApplier:
    """Counts what is applied, in order."""

    def __init__(self, scheduler):
        self.scheduler = scheduler

    def apply(self, plan, result):
        assert plan.seq == result.seq == self.scheduler.applied + 1
        self.scheduler.applied += 1
        return EngineOutputs(deltas=(RequestDelta(request_id=f"step {plan.seq}"),))

    def flush(self):
        return None


class Handle:
    """A step that ends only after its late part came."""

    def __init__(self, plan):
        self.plan, self.parts = plan, None

    def result(self):
        if self.plan.late:
            assert self.parts == (LatePart(self.plan.seq),), "the runner would wait for ever"
        return StepResult(seq=self.plan.seq, tokens=ragged([]))

    def supply(self, parts):
        assert self.parts is None, "late parts come once"
        self.parts = tuple(parts)


class ScriptedExecutor:
    """Remembers how many steps were in flight at once."""

    def __init__(self):
        self.handles, self.stopped = deque(), 0

    def submit(self, plan):
        self.handles.append(Handle(plan))
        return self.handles[-1]

    def call(self, method, **args):
        return (method, args)

    def stop(self):
        self.stopped += 1


def make(count, depth, late=True):
    scheduler, executor = ScriptedScheduler(count, late), ScriptedExecutor()
    return EngineCore(scheduler, ScriptedApplier(scheduler), executor, depth=depth), scheduler, executor


def request(name):
    return EngineRequest(request_id=name, prompt_token_ids=(1,), sampling=SamplingParams())


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_every_depth_applies_all_steps_in_order(depth, late, count):
    core, scheduler, _ = make(count, depth, late)
    names = []
    for _ in range(100):
        outputs = core.step()
        if outputs is None:
            break
        names += [d.request_id for d in outputs.deltas]
        assert scheduler.seq - scheduler.applied <= depth - 1
    assert names == [f"step {i + 1}" for i in range(count)]
    assert not core.busy
    assert scheduler.applied == count


def test_a_request_that_cannot_be_queued_ends_alone():
    core, scheduler, _ = make(0, 1)
    for name in ("a", "bad", "bug", "b"):
        core.add(request(name))
    assert scheduler.added == ["a", "b"]
    assert core.busy
    outputs = core.step()
    refused = {d.request_id: d for d in outputs.deltas}
    assert refused["bad"].finish is FinishReason.IGNORED
    assert refused["bad"].error == "the id is taken"
    assert refused["bug"].finish is FinishReason.ERROR
    assert core.step() is None


def test_calls_go_by_name_and_unknown_ones_say_what_there_is():
    core, _, _ = make(0, 1)
    assert core.call("ping", {}) == "pong"
    assert core.call("worker", {"method": "x"}) == ("x", {})
    with pytest.raises(OctavoError, match=r"no call 'pong'; it has .*ping"):
        core.call("pong", {})


def test_an_end_waits_for_what_parts_have_under_way_but_not_for_ever(caplog):
    core, scheduler, _ = make(0, 1)
    scheduler.unsettled = 4
    core.settle()
    assert scheduler.unsettled == 0 and caplog.messages == []
    scheduler.unsettled = 1 << 60
    began = time.monotonic()
    core.settle(timeout_s=0.05)
    assert 0.05 <= time.monotonic() - began < 2
    assert caplog.messages == [f"stopping although something was still under way after 0.05 s: {UNFINISHED}"]
    busy, scheduler, _ = make(3, 1)
    scheduler.unsettled = 10
    busy.settle()
    assert scheduler.unsettled == 10, "with requests running there is no end to wait for"


def test_stopping_stops_the_executor():
    core, _, executor = make(0, 1)
    core.stop()
    assert executor.stopped == 1
    assert core.next_deadline() == 7.0


def test_SCH_27_what_happened_to_the_cache_travels_with_the_step_and_without_one_too():
    events = [(CacheEvent("stored", 0, b"a"), CacheEvent("stored", 1, b"b")), (), (CacheEvent("cleared"),)]
    scheduler, executor = ScriptedScheduler(2, late=False), ScriptedExecutor()
    core = EngineCore(scheduler, ScriptedApplier(scheduler), executor, take_events=lambda: events.pop(0))
    first, second, idle = core.step(), core.step(), core.step()
    assert [d.request_id for d in first.deltas] == ["step 1"] and first.cache == CacheChanges(stored=(b"a",))
    assert [d.request_id for d in second.deltas] == ["step 2"] and second.cache is None
    assert idle == EngineOutputs(cache=CacheChanges(cleared=True))


def test_SCH_27_events_of_the_cache_are_not_lost_beside_a_refused_request():
    scheduler, executor = ScriptedScheduler(1, late=False), ScriptedExecutor()
    take = lambda: (CacheEvent("stored", 0, b"a"),)  # noqa: E731
    core = EngineCore(scheduler, ScriptedApplier(scheduler), executor, take_events=take)
    core.add(EngineRequest(request_id="bad", prompt_token_ids=(1,), sampling=SamplingParams()))
    outputs = core.step()
    assert [d.request_id for d in outputs.deltas] == ["bad", "step 1"]
    assert outputs.cache == CacheChanges(stored=(b"a",))
