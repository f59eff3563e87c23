"""The executor on one thread: order, errors, late parts, stopping (EXE-1, EXE-5; design: threads)."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from octavo.base.errors import EngineDead, LoadError
from octavo.base.kvspec import KVLayout
from octavo.base.step import PlanPart, Ragged, StepPlan, StepResult, as_ints, empty_batch
from octavo.config.facts import DeviceFacts
from octavo.executor.api import LoadReport, ProfileReport, WorkerConfig
from octavo.executor.uniproc import UniprocExecutor
from tests.support.toy_model import toy_device, toy_facts

CONFIG = WorkerConfig(
    facts=toy_facts(), dtype="float32", load_format="auto", block_size=None, max_model_len=8, max_num_seqs=2,
    max_num_batched_tokens=8, num_threads=1, device="cpu", attention_backend=None, seed=0,
)  # fmt: skip


class Mask(PlanPart, frozen=True):
    """A late part."""


class Extra(PlanPart, frozen=True):
    """Another."""


class FakeWorker:
    """Notes on which thread and in which order it is called. A step of seq 13 fails."""

    def __init__(self, config: WorkerConfig) -> None:
        self.notes: list[Any] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.came: list[Sequence[PlanPart]] = []

    def _note(self, what: Any) -> None:
        self.notes.append(what)
        self.threads.add(threading.get_ident())
        assert torch.is_inference_mode_enabled()

    def load(self, progress: Callable[[str], None]) -> LoadReport:
        self._note("load")
        progress("reading")
        return LoadReport(specs=(), weight_bytes=1, seconds=0.0, attention_backend="fake")

    def profile(self) -> ProfileReport:
        self._note("profile")
        return ProfileReport(peak_activation_bytes=1, available_bytes=2, seconds=0.0)

    def allocate(self, layout: KVLayout) -> None:
        self._note("allocate")

    def warm_up(self) -> float:
        self._note("warm_up")
        return 0.5

    def step(self, plan: StepPlan, late: Any) -> StepResult:
        self.gate.wait(10)
        self._note(plan.seq)
        if plan.seq == 13:
            raise ValueError("no luck")
        if plan.late:
            self.came.append(late.wait(plan.late))
        return StepResult(seq=plan.seq, tokens=Ragged(as_ints([0]), as_ints([])))

    def call(self, method: str, args: dict[str, Any]) -> Any:
        self._note((method, args))
        return args

    def stop(self) -> None:
        self._note("stop")


class Rig:
    """An executor with a fake worker."""

    def __init__(self) -> None:
        self.made: list[FakeWorker] = []

        def make(config: WorkerConfig) -> Any:
            self.made.append(FakeWorker(config))
            return self.made[-1]

        def prober(device: str) -> DeviceFacts:
            assert device == "cpu"
            return toy_device()

        self.executor = UniprocExecutor("cpu", make=make, prober=prober)

    def load(self) -> "Rig":
        self.executor.load(CONFIG, lambda line: None)
        return self

    @property
    def worker(self) -> FakeWorker:
        return self.made[-1]


@pytest.fixture
def rig() -> Any:
    rig = Rig()
    yield rig
    if rig.made:
        rig.worker.gate.set()
    rig.executor.stop()


def plan(seq: int, *late: str) -> StepPlan:
    return StepPlan(seq=seq, batch=empty_batch(1), late=late)


def test_everything_runs_on_one_thread_that_is_not_the_callers(rig: Rig) -> None:
    executor, lines = rig.executor, []
    assert executor.probe() == toy_device()
    assert executor.load(CONFIG, lines.append).attention_backend == "fake" and lines == ["reading"]
    assert executor.profile().available_bytes == 2
    executor.allocate(KVLayout(groups=(), places=(), num_blocks=1, block_bytes=0, total_bytes=0))
    assert executor.warm_up() == 0.5
    executor.submit(plan(0)).result()
    assert executor.call("x", a=1) == {"a": 1}
    worker = rig.worker
    executor.stop()
    assert worker.notes == ["load", "profile", "allocate", "warm_up", 0, ("x", {"a": 1}), "stop"]
    assert len(worker.threads) == 1 and threading.get_ident() not in worker.threads


def test_submit_returns_at_once_and_steps_and_calls_keep_their_order(rig: Rig) -> None:
    rig.load().worker.gate.clear()
    handles = [rig.executor.submit(plan(i)) for i in range(5)]
    assert not any(h.done() for h in handles)
    threading.Timer(0.05, rig.worker.gate.set).start()
    assert rig.executor.call("after") == {}
    assert all(h.done() for h in handles)
    assert [h.result().seq for h in handles] == list(range(5))
    assert rig.worker.notes == ["load", 0, 1, 2, 3, 4, ("after", {})]


def test_a_step_waits_for_all_its_late_parts(rig: Rig) -> None:
    rig.load()
    handle = rig.executor.submit(plan(1, "Mask", "Extra"))
    handle.supply([Extra()])
    time.sleep(0.02)
    assert not handle.done()
    handle.supply([Mask()])
    assert handle.result().seq == 1
    assert rig.worker.came == [(Extra(), Mask())]


def test_a_failed_step_kills_the_executor_and_says_why(rig: Rig) -> None:
    rig.load()
    first, bad, after = (rig.executor.submit(plan(i)) for i in (12, 13, 14))
    assert first.result().seq == 12
    with pytest.raises(EngineDead, match=r"step 13 failed: ValueError.*no luck") as caught:
        bad.result()
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(EngineDead, match="no luck"):
        after.result()
    with pytest.raises(EngineDead):
        rig.executor.submit(plan(15)).result()
    assert not rig.executor.healthy()
    assert 14 not in rig.worker.notes and 15 not in rig.worker.notes


def test_errors_of_other_calls_are_raised_as_they_are_and_kill_nobody(rig: Rig) -> None:
    def broken(config: WorkerConfig) -> Any:
        raise LoadError("no such file")

    executor = UniprocExecutor("cpu", make=broken, prober=lambda device: toy_device())
    with pytest.raises(LoadError, match="no such file"):
        executor.load(CONFIG, lambda line: None)
    with pytest.raises(RuntimeError, match="call load first"):
        executor.profile()
    assert executor.healthy()
    executor.stop()


def test_stop_frees_a_step_that_waits_for_late_parts_and_refuses_what_comes_after(rig: Rig) -> None:
    rig.load()
    waiting, behind = rig.executor.submit(plan(1, "Mask")), rig.executor.submit(plan(2))
    worker = rig.worker
    rig.executor.stop()
    rig.executor.stop()
    with pytest.raises(EngineDead, match="abandoned"):
        waiting.result()
    with pytest.raises(EngineDead):
        behind.result()
    with pytest.raises(EngineDead, match="stopped"):
        rig.executor.submit(plan(3)).result()
    with pytest.raises(EngineDead, match="stopped"):
        rig.executor.call("x")
    assert worker.notes[-1] == "stop" and not rig.executor.healthy()
    assert not rig.executor._thread.is_alive()


def test_stop_before_load_is_fine() -> None:
    UniprocExecutor("cpu").stop()


def test_an_executor_that_is_dropped_takes_its_thread_along() -> None:
    executor = UniprocExecutor("cpu", prober=lambda device: toy_device())
    executor.probe()
    thread, gone = executor._thread, weakref.ref(executor)
    del executor
    gc.collect()
    assert gone() is None
    thread.join(5)
    assert not thread.is_alive()
