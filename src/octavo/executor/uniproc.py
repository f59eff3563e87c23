"""The worker in this process, on one thread of its own.

Promises: everything the worker does happens on that thread (several threads driving OpenMP would each get a pool
of compute threads); `submit` returns at once, steps run in the order submitted; what goes wrong there is raised
here. After a step has failed as a whole the executor is dead: its state cannot be trusted.
Does not know: how the worker is made (see `host`), or what plans mean.
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import torch

from octavo.base.errors import EngineDead
from octavo.base.kvspec import KVLayout
from octavo.base.step import PlanPart, StepPlan, StepResult
from octavo.base.threads import cpu_seconds
from octavo.config.facts import DeviceFacts
from octavo.executor import host
from octavo.executor.api import LoadReport, ProfileReport, WorkerConfig

T = TypeVar("T")
Job = Callable[[], None]
Jobs = queue.SimpleQueue["Job | None"]

STOPPED = "the executor was stopped"


class _Meter:
    """What the worker's thread has done, for others to see.

    Owns: the count and the thread's number.
    """

    def __init__(self) -> None:
        self.done = 0
        self.native_id = 0  # not started yet


class UniprocHandle:
    """A step under way, seen from both sides: the engine waits for the result, the runner for late parts.

    Owns: the outcome and the late parts that have come.
    """

    def __init__(self, seq: int) -> None:
        self._seq = seq
        self._result: StepResult | None = None
        self._error: EngineDead | None = None
        self._running = threading.Lock()  # held until the outcome is there; a step's fastest signal
        self._running.acquire()
        self._late: queue.SimpleQueue[tuple[PlanPart, ...] | None] = queue.SimpleQueue()

    def result(self) -> StepResult:
        """Wait for the step. Raises `EngineDead` when it, or one before it, failed as a whole."""
        with self._running:
            pass
        if self._result is None:
            raise self._error or EngineDead(f"step {self._seq} has no result")
        return self._result

    def done(self) -> bool:
        """True when `result()` returns at once."""
        return self._result is not None or self._error is not None

    def supply(self, parts: Sequence[PlanPart]) -> None:
        """Hand over late parts; in several calls if need be."""
        self._late.put(tuple(parts))

    def wait(self, names: Sequence[str]) -> tuple[PlanPart, ...]:
        """The runner's side: parts of these types, once all are there. Raises `EngineDead` when abandoned."""
        came: list[PlanPart] = []
        while not set(names) <= {type(part).__name__ for part in came}:
            parts = self._late.get()
            if parts is None:
                raise EngineDead(f"step {self._seq} was abandoned while it waited for {', '.join(names)}")
            came += parts
        return tuple(came)

    def abandon(self) -> None:
        """No more late parts will come."""
        self._late.put(None)

    def finish(self, run: Callable[[], StepResult], failed: Callable[[BaseException], None]) -> None:
        """The worker's side: run the step and keep the outcome. `failed` hears first what went wrong."""
        try:
            self._result = run()
        except BaseException as error:
            failed(error)
            dead = error if isinstance(error, EngineDead) else EngineDead(f"step {self._seq} failed: {error!r}")
            dead.__cause__ = None if dead is error else error
            self._error = dead
        finally:
            self._running.release()


class UniprocExecutor:
    """One worker on a thread of this process.

    Owns: the thread, its queue of jobs, the steps in flight, and whether a step has failed. The worker itself is
    touched by the thread only.
    """

    def __init__(
        self,
        device: str = "auto",
        *,
        make: Callable[[WorkerConfig], host.HostedWorker] = host.make_worker,
        prober: Callable[[str], DeviceFacts] | None = None,
        plugins: tuple[str, ...] | None = (),
    ) -> None:
        self._device = device
        self._make = make
        self._prober = prober or partial(host.probe, plugins=plugins)
        self._worker: host.HostedWorker | None = None
        self._failure: BaseException | None = None
        self._stopped = False
        self._flight: deque[UniprocHandle] = deque()
        self._jobs: Jobs = queue.SimpleQueue()
        self._meter = _Meter()
        self._thread = threading.Thread(target=_work, args=(self._jobs, self._meter), name="octavo-worker", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None)  # an executor that is dropped takes its thread along

    def probe(self) -> DeviceFacts:
        """Facts of the device; callable before `load`."""
        return self._run(lambda: self._prober(self._device))

    def describe(self, config: WorkerConfig) -> LoadReport:
        """What `load` would give, without reading weights or using memory."""
        return self._run(lambda: host.describe(config))

    def load(self, config: WorkerConfig, progress: Callable[[str], None]) -> LoadReport:
        """Build the model and read its weights. `progress` is called on the worker's thread."""

        def job() -> LoadReport:
            torch.set_num_threads(config.num_threads)  # counts for the thread that says it
            self._worker = self._make(config)
            return self._worker.load(progress)

        return self._run(job)

    def profile(self) -> ProfileReport:
        """Measure one step of the largest shape."""
        return self._run(lambda: self._loaded().profile())

    def allocate(self, layout: KVLayout) -> None:
        """Reserve KV memory and bind the layers to it."""
        self._run(lambda: self._loaded().allocate(layout))

    def warm_up(self) -> float:
        """Run small steps so that the first request is not slower than the second; seconds."""
        return self._run(lambda: self._loaded().warm_up())

    def submit(self, plan: StepPlan) -> UniprocHandle:
        """Start a step; returns at once."""
        handle = UniprocHandle(plan.seq)
        while self._flight and self._flight[0].done():
            self._flight.popleft()
        self._flight.append(handle)

        def step() -> StepResult:
            if self._failure is not None:
                raise EngineDead(f"the worker is gone since an earlier step failed: {self._failure!r}")
            return self._loaded().step(plan, handle)

        if self._stopped:
            handle.finish(_refuse, self._fail)
        else:
            self._jobs.put(lambda: handle.finish(step, self._fail))
        return handle

    def call(self, method: str, **args: Any) -> Any:
        """An administrative call, run between steps."""
        return self._run(lambda: self._loaded().call(method, args))

    def healthy(self) -> bool:
        """False once a step failed as a whole, or the executor was stopped."""
        return self._failure is None and not self._stopped and self._thread.is_alive()

    def progress(self) -> tuple[int, float]:
        """Jobs done, and processor time of the worker's thread, which computes with the others."""
        return self._meter.done, cpu_seconds(self._meter.native_id)

    def stop(self) -> None:
        """Finish the step under way, free everything and join the thread; may be called twice."""
        if self._stopped:
            return
        self._stopped = True
        for handle in self._flight:
            handle.abandon()
        done: Future[None] = Future()
        self._jobs.put(lambda: _settle(done, self._let_go))
        self._jobs.put(None)
        self._thread.join()
        self._flight.clear()
        if done.done():
            done.result()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error

    def _let_go(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()

    def _loaded(self) -> host.HostedWorker:
        if self._worker is None:
            raise RuntimeError("the executor has no worker yet: call load first")
        return self._worker

    def _run(self, what: Callable[[], T]) -> T:
        """Run on the worker's thread and wait; what is raised there is raised here."""
        if self._stopped:
            raise EngineDead(STOPPED)
        outcome: Future[T] = Future()
        self._jobs.put(lambda: _settle(outcome, what))
        return outcome.result()


def _settle(outcome: "Future[T]", what: Callable[[], T]) -> None:
    try:
        outcome.set_result(what())
    except BaseException as error:
        outcome.set_exception(error)


def _refuse() -> StepResult:
    raise EngineDead(STOPPED)


def _work(jobs: Jobs, meter: _Meter) -> None:
    """The thread: jobs in order until the end mark. It does not hold the executor, which can be dropped."""
    meter.native_id = threading.get_native_id()
    with torch.inference_mode():
        while (job := jobs.get()) is not None:
            job()
            meter.done += 1
            del job  # what it holds must not live until the next one comes
