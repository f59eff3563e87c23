"""The load generator: sends a workload to any OpenAI-compatible server and times what comes back (OPS-8).

Promises: bodies are made before the clock starts; open-loop requests leave when they are due, whatever the server
does; every request gives a sample, failed ones with their error; the client measures what it costs itself.
Does not know: what the figures mean (see `report`), or who started the server.
"""

import asyncio
import contextlib
import gc
import sys
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from octavo.base.errors import ConfigError
from octavo.base.loops import new_event_loop
from octavo.bench.answers import AnswerReader
from octavo.bench.bodies import COMPLETIONS, PATHS, Bodies, Body, Turn, units
from octavo.bench.canned import canned_server
from octavo.bench.connections import Connections, HttpAddress, RequestError
from octavo.bench.samples import ClientCost, LoadResult, Sample
from octavo.bench.workloads import Item, Workload

__all__ = [
    "ClientCost",
    "LoadResult",
    "LoadTarget",
    "Sample",
    "ceilings",
    "own_ceiling",
    "run",
    "run_load",
]  # fmt: skip

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 3600.0
LAG_PERIOD_S = 0.01
CEILING_STREAMS, CEILING_TOKENS, CEILING_PAUSE_S = 32, 150, 0.003
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTarget:
    """A server and how to talk to it. `extra` is merged into each body; `base_url` may end in /v1 or not."""

    base_url: str
    model: str
    api: str = COMPLETIONS  # or "chat"
    extra: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S  # for one whole answer


async def run(target: LoadTarget, work: Workload, *, clock: Clock = time.perf_counter) -> LoadResult:
    """Send every item and wait for every answer. Raises `ConfigError` when the workload cannot be sent at all."""
    return await _Run(target, work, clock).go()


def run_load(target: LoadTarget, work: Workload) -> LoadResult:
    """`run` in an event loop of its own, the fastest there is."""
    return in_loop(run(target, work))


def in_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in an event loop of its own."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(coroutine)


def own_ceiling() -> float:
    """Streamed events per second that this client can take on one core when each comes alone (takes a second).

    Measured against a canned server in another process, as events over the client's CPU time: the pace of the
    server, and who else uses the machine, do not count.
    """
    return ceilings()[0]


def ceilings() -> tuple[float, float]:
    """Events per second of CPU time when each is read alone, and when many come together."""
    rates = []
    for pause_s, together in ((CEILING_PAUSE_S, 1), (0.0, 64)):
        num_tokens = CEILING_TOKENS if together == 1 else CEILING_TOKENS * 20
        items = (Item(prompt=(1, 2, 3), max_tokens=num_tokens),) * CEILING_STREAMS
        work = Workload(name="ceiling", items=items, concurrency=CEILING_STREAMS)
        with canned_server(pause_s=pause_s, together=together) as url:
            result = run_load(LoadTarget(base_url=url, model="canned"), work)
        failed = [s.error for s in result.samples if s.error]
        if failed:
            raise RuntimeError(f"the client's own test failed: {failed[0]}")
        rates.append(1 / result.client.cpu_s_per_chunk)
    return rates[0], rates[1]


class _Run:
    """One run of one workload.

    Owns: its samples and its measures of the client.
    """

    def __init__(self, target: LoadTarget, work: Workload, clock: Clock) -> None:
        if work.concurrency is not None and work.concurrency < 1:
            raise ConfigError(f"the concurrency must be at least 1 request, got {work.concurrency}.")
        if not work.items:
            raise ConfigError(f"the workload {work.name!r} has no requests.")
        address = HttpAddress(target.base_url)
        self._target, self._work, self._clock = target, work, clock
        self._bodies = Bodies(work, model=target.model, api=target.api, extra=target.extra)
        self._head = _head(address, target)
        self._connections = Connections(address, clock)
        self._units = list(units(work.items))
        make = self._bodies.turn_text if work.real_history else self._bodies.whole
        self._prepared: list[bytes | Body] = [make(item) for item in work.items]
        self._samples: list[Sample | None] = [None] * len(work.items)
        self._start = 0.0
        self._num_chunks = 0
        self._lags: list[float] = []
        self._max_late_s = 0.0

    async def go(self) -> LoadResult:
        """Send, wait, sum up."""
        with _frozen():
            lag = asyncio.create_task(self._watch_lag())
            cpu_s = time.thread_time()
            self._start = self._clock()
            try:
                await (self._open_loop() if self._work.concurrency is None else self._closed_loop())
            finally:
                cpu_s = time.thread_time() - cpu_s
                lag.cancel()
                await asyncio.gather(lag, return_exceptions=True)
                self._connections.close()
        samples = tuple(s for s in self._samples if s is not None)
        first, last = min(s.start_s for s in samples), max(s.end_s for s in samples)
        client = ClientCost(
            cpu_s=cpu_s,
            num_chunks=self._num_chunks,
            max_lag_s=max(self._lags, default=0.0),
            mean_lag_s=sum(self._lags) / max(len(self._lags), 1),
            max_late_s=self._max_late_s,
        )
        return LoadResult(name=self._work.name, samples=samples, wall_s=last - first, client=client)

    async def _open_loop(self) -> None:
        ordered = sorted(self._units, key=lambda unit: self._work.items[unit[0]].at_s)
        async with asyncio.TaskGroup() as tasks:
            for unit in ordered:
                await self._until(self._work.items[unit[0]].at_s)
                tasks.create_task(self._unit(unit))

    async def _closed_loop(self) -> None:
        left = iter(sorted(self._units, key=lambda unit: self._work.items[unit[0]].at_s))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(self._work.concurrency or 1, len(self._units))):
                tasks.create_task(self._user(left))

    async def _user(self, left: Iterator[tuple[int, ...]]) -> None:
        """One of the users of a closed loop: takes the next unit when it has finished one."""
        for unit in left:
            await self._until(self._work.items[unit[0]].at_s)
            await self._unit(unit)

    async def _until(self, at_s: float) -> None:
        while (wait_s := at_s - (self._clock() - self._start)) > 0:
            await asyncio.sleep(wait_s)

    async def _unit(self, unit: Sequence[int]) -> None:
        """The items of one conversation, or a single one. An item after a failed one is still sent."""
        history: list[Turn] = []
        for place, i in enumerate(unit):
            item, prepared = self._work.items[i], self._prepared[i]
            if place:
                await self._until(item.at_s)
            if isinstance(prepared, bytes):
                text = await self._request(i, self._bodies.next_turn(history, prepared, item.max_tokens), place)
                history.append((prepared, text))
            else:
                await self._request(i, prepared, place)

    async def _request(self, i: int, body: Body, place: int) -> str:
        """Send one item and keep its sample; its text where that is needed."""
        work, target = self._work, self._target
        item = work.items[i]
        request = (self._head + b"%d\r\n\r\n" % sum(map(len, body)), *body)
        answer = AnswerReader(target.api, keep_text=work.real_history)

        def fresh() -> AnswerReader:
            nonlocal answer
            answer = AnswerReader(target.api, keep_text=work.real_history)
            return answer

        error: str | None = None
        start = self._clock()
        try:
            async with asyncio.timeout(target.timeout_s):
                await self._connections.send(request, fresh)
            answer.finish(work.stream)
            error = answer.error
        except RequestError as failed:
            error = answer.error or str(failed)
        except TimeoutError:
            error = f"no whole answer within {target.timeout_s:g} s"
        open_loop = work.concurrency is None and not place
        self._keep(i, item, answer, start - self._start, item.at_s if open_loop else None, error)
        return "".join(answer.pieces)

    def _keep(
        self, i: int, item: Item, answer: AnswerReader, start_s: float, due_s: float | None, error: str | None
    ) -> None:
        end_s = self._clock() - self._start
        self._num_chunks += answer.num_events
        if due_s is not None:
            self._max_late_s = max(self._max_late_s, start_s - due_s)
        times = array("d", [t - self._start for t in answer.times])
        usage = answer.usage or {}
        counted = "completion_tokens" not in usage
        self._samples[i] = Sample(
            due_s=start_s if due_s is None else due_s,
            start_s=start_s,
            end_s=end_s,
            first_token_s=times[0] if times else None,
            token_times=times,
            prompt_tokens=usage.get("prompt_tokens"),
            output_tokens=len(times) if counted else usage["completion_tokens"],
            cached_tokens=usage.get("cached_tokens"),
            counted=counted,
            conversation=item.conversation,
            error=error,
        )

    async def _watch_lag(self) -> None:
        """How late the event loop wakes who asked to be woken."""
        while True:
            asked = self._clock()
            await asyncio.sleep(LAG_PERIOD_S)
            self._lags.append(max(self._clock() - asked - LAG_PERIOD_S, 0.0))


def _head(address: HttpAddress, target: LoadTarget) -> bytes:
    lines = [
        f"POST {address.path}{PATHS[target.api]} HTTP/1.1",
        f"Host: {address.authority}",
        "Content-Type: application/json",
        "Accept: text/event-stream, application/json",
        f"User-Agent: octavo-bench/{sys.version_info[0]}",
    ]
    if target.api_key is not None:
        lines.append(f"Authorization: Bearer {target.api_key}")
    return ("\r\n".join([*lines, "Content-Length: "])).encode()


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """What was prepared is left out of garbage collections while the clock runs."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
