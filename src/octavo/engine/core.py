"""One step loop for every depth: fill the flight, wait for the oldest, apply.

Promises: at depth 1 a step is scheduled, run and applied before the next; at depth d up to d plans are in
flight, and tokens are the same. A request that cannot be added ends alone, with an error of its own.
Does not know: threads, sockets, text, or which features are installed.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from octavo.base.errors import OctavoError
from octavo.base.outputs import EngineOutputs, RequestDelta, StatsSnapshot
from octavo.base.requests import EngineRequest
from octavo.base.step import PlanPart, StepPlan, StepResult
from octavo.base.types import FinishReason
from octavo.executor.api import Executor, StepHandle
from octavo.kvcache.prefix import CacheEvent, changes_of

log = logging.getLogger(__name__)

SETTLE_S = 5.0
SETTLE_POLL_S = 0.001
UNFINISHED = "what other engines were to fetch from here, or what was to be stored, may not get there"


class SchedulerApi(Protocol):
    """What the core needs of a scheduler."""

    def add(self, req: EngineRequest) -> None: ...
    def abort(self, request_ids: Sequence[str]) -> None: ...
    def schedule(self) -> StepPlan | None: ...
    def has_work(self) -> bool: ...
    def next_deadline(self) -> float | None: ...
    def supply(self, plan: StepPlan) -> tuple[PlanPart, ...]: ...
    def reset_prefix_cache(self) -> bool: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def settled(self) -> bool: ...
    def close(self) -> None: ...
    def stats(self) -> StatsSnapshot: ...
    def describe(self, plan: StepPlan | None) -> list[str]: ...


class ApplierApi(Protocol):
    """What the core needs of a result applier."""

    def apply(self, plan: StepPlan, result: StepResult) -> EngineOutputs: ...
    def flush(self) -> EngineOutputs | None: ...


def _no_events() -> tuple[CacheEvent, ...]:
    """Nobody asked what the cache holds."""
    return ()


class EngineCore:
    """Drives scheduler and executor. `take_events` gives what happened to the prefix cache since it was last asked.

    Owns: the flight (plans submitted and not yet applied), the last plan and its moment, and the deltas of requests refused on arrival.
    """

    def __init__(
        self,
        scheduler: SchedulerApi,
        applier: ApplierApi,
        executor: Executor,
        *,
        depth: int = 1,
        take_events: Callable[[], tuple[CacheEvent, ...]] = _no_events,
    ) -> None:
        self._scheduler = scheduler
        self._applier = applier
        self._executor = executor
        self._depth = depth
        self._take_events = take_events
        self._flight: deque[tuple[StepPlan, StepHandle]] = deque()
        self._refused: list[RequestDelta] = []
        self._last: tuple[StepPlan, float] | None = None  # for `describe`; also while it is being submitted
        self._applied = -1
        self._calls: dict[str, Callable[..., Any]] = {
            "reset_prefix_cache": scheduler.reset_prefix_cache,
            "pause": scheduler.pause,
            "resume": scheduler.resume,
            "stats": scheduler.stats,
            "ping": lambda: "pong",
            "worker": executor.call,
        }

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Whatever is wrong with it ends it, and only it."""
        try:
            self._scheduler.add(request)
        except Exception as error:  # the border between one request and everybody else's
            reason = FinishReason.IGNORED if isinstance(error, OctavoError) else FinishReason.ERROR
            text = str(error) if isinstance(error, OctavoError) else f"the request could not be queued: {error!r}"
            self._refused.append(RequestDelta(request_id=request.request_id, finish=reason, error=text))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now; each yields a last delta with the next outputs."""
        self._scheduler.abort(request_ids)

    def call(self, method: str, args: dict[str, Any]) -> Any:
        """An administrative call between steps."""
        if method not in self._calls:
            raise OctavoError(f"the engine has no call {method!r}; it has {', '.join(sorted(self._calls))}")
        return self._calls[method](**args)

    @property
    def busy(self) -> bool:
        """True while a step is in flight or anything can or must be done."""
        return bool(self._flight or self._refused) or self._scheduler.has_work()

    def next_deadline(self) -> float | None:
        """Monotonic second by which `step` must be called even if nothing arrives."""
        return self._scheduler.next_deadline()

    def step(self) -> EngineOutputs | None:
        """Fill the flight, wait for its oldest step, apply it. None: there was nothing to do."""
        while len(self._flight) < self._depth and (plan := self._scheduler.schedule()):
            self._last = plan, time.monotonic()
            self._flight.append((plan, self._executor.submit(plan)))
            if len(self._flight) == 1:
                self._supply()
        if not self._flight:
            return self._with_changes(self._with_refused(self._applier.flush()))
        plan, handle = self._flight.popleft()
        outputs = self._applier.apply(plan, handle.result())
        self._applied = plan.seq
        self._supply()
        return self._with_changes(self._with_refused(outputs))

    def _supply(self) -> None:
        """Every step before the oldest in flight has been applied: its late parts can be made."""
        if self._flight and self._flight[0][0].late:
            plan, handle = self._flight[0]
            handle.supply(self._scheduler.supply(plan))

    def _with_refused(self, outputs: EngineOutputs | None) -> EngineOutputs | None:
        if not self._refused:
            return outputs
        refused, self._refused = tuple(self._refused), []
        if outputs is None:
            return EngineOutputs(deltas=refused)
        return EngineOutputs(deltas=refused + outputs.deltas, stats=outputs.stats)

    def _with_changes(self, outputs: EngineOutputs | None) -> EngineOutputs | None:
        events = self._take_events()
        if not events or (changes := changes_of(events)) is None:
            return outputs
        return msgspec.structs.replace(outputs or EngineOutputs(), cache=changes)

    def settle(self, timeout_s: float = SETTLE_S) -> None:
        """Let what parts have under way come to its end while nothing runs any more, such as KV on its way to a disk."""
        end = time.monotonic() + timeout_s
        while not self._scheduler.has_work() and not self._scheduler.settled():
            if time.monotonic() >= end:
                log.warning("stopping although something was still under way after %g s: %s", timeout_s, UNFINISHED)
                return
            if self.step() is None:
                time.sleep(SETTLE_POLL_S)

    def healthy(self) -> bool:
        """False once the worker is gone; from any thread."""
        return self._executor.healthy()

    def progress(self) -> tuple[int, float]:
        """What the worker has done (it only grows) and its processor time in seconds; from any thread."""
        return self._executor.progress()

    def describe(self) -> list[str]:
        """The last step and the scheduler's state, for people; from any thread, whatever the step is doing (OPS-3)."""
        if self._last is None:
            return ["no step was planned yet", *self._scheduler.describe(None)]
        plan, began_s = self._last
        state = "done" if plan.seq <= self._applied else "under way"
        ago_s = time.monotonic() - began_s
        return [f"last step: {plan.seq}, {state}, planned {ago_s:.1f} s ago", *self._scheduler.describe(plan)]

    def stop(self) -> None:
        """The scheduler's parts end, then the executor does (TIR-21)."""
        self._scheduler.close()
        self._executor.stop()
