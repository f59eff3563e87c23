"""A scripted feature: a `ControlPart` that delays, fails, holds blocks and asks for patience, and its data half.

Loads of the data half happen when the plan is submitted, ahead of the rows of steps still in flight: as early as a
real transfer could, so that blocks given away too soon are caught.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.base.outputs import OutputPart
from octavo.base.step import PlanPart, ResultPart, StepPlan, StepResult
from octavo.base.types import RequestState
from octavo.kvcache.manager import KVCacheManager
from octavo.scheduler.plan_builder import PlanBuilder
from octavo.scheduler.request import Request
from octavo.scheduler.seams import Absorbed, FinishHold, Late, Match, Readiness, Retry
from tests.simulate.toy import Broken, Memory, extend

Tables = tuple[tuple[int, ...], ...]


class Job(msgspec.Struct, frozen=True):
    """Fill positions `start .. end - 1`; only those before `good` work out. `delay` results later it is done."""

    number: int
    request_id: str
    tokens: tuple[int, ...]
    tables: Tables
    start: int
    end: int
    good: int
    delay: int


class Load(PlanPart, frozen=True):
    """What the data half shall fill."""

    jobs: tuple["Job", ...]


class Done(ResultPart, frozen=True):
    """Loads that ended: the job's number, the request, and how many tokens are there."""

    jobs: tuple[tuple[int, str, int], ...]


class Note(OutputPart, frozen=True):
    """What the client is told at the end."""

    text: str


@dataclass
class _Promise:
    number: int
    known: tuple[int, ...]
    tokens: int
    wait: bool
    local: int
    good: int
    tables: Tables = ()
    sent: bool = False


class ScriptedPart:
    """Control half; `random` decides what it does to each request.

    Owns: promises, parked requests and holds, and the number of calls of each hook.
    """

    name = "scripted"

    def __init__(self, rng: random.Random, kv: KVCacheManager, memory: Memory) -> None:
        self._rng = rng
        self._kv = kv
        self._memory = memory
        self.calls: dict[str, int] = {}
        self.promises: dict[str, _Promise] = {}
        self.grammar: dict[str, int] = {}  # request id -> results until it is ready
        self.holds: dict[str, tuple[int, Tables, list[int]]] = {}
        self.retries: dict[str, int] = {}
        self.poisoned: set[str] = set()  # running with a load that failed
        self.tables: dict[str, list[list[int]]] = {}
        self.alive: set[str] = set()
        self._number = 0

    def _called(self, hook: str) -> None:
        self.calls[hook] = self.calls.get(hook, 0) + 1

    def on_arrival(self, req: Request) -> RequestState:
        self._called("on_arrival")
        if req.request_id in self.alive:
            raise Broken("arrived twice")
        self.alive.add(req.request_id)
        self.retries[req.request_id] = self._rng.choice((0, 0, 0, 1, 3))
        if self._rng.random() < 0.2:
            self.grammar[req.request_id] = self._rng.randrange(4)
            return RequestState.WAITING_GRAMMAR
        return RequestState.WAITING

    def match(self, req: Request, local_tokens: int) -> Match | Retry:
        self._called("match")
        if req.state is not RequestState.WAITING or self.tables.get(req.request_id):
            raise Broken(f"match for {req!r}, which has KV of its own")
        self.promises.pop(req.request_id, None)
        if self.retries[req.request_id] > 0:
            self.retries[req.request_id] -= 1
            return Retry()
        kind = self._rng.random()
        if kind < 0.5:
            return Match()
        tokens = self._rng.randint(1, req.num_tokens + 3)
        end = min(tokens, req.num_tokens - 1)
        good = end if self._rng.random() < 0.6 else self._rng.randint(0, end)
        wait = kind < 0.85
        self._number += 1
        self.promises[req.request_id] = _Promise(self._number, req.known_tokens(), end, wait, local_tokens, good)
        return Match(tokens, wait=wait, source="tier")

    def after_reserve(self, req: Request, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        self._called("after_reserve")
        table = self.tables.setdefault(req.request_id, [[] for _ in block_ids])
        for have, more in zip(table, block_ids, strict=True):
            have.extend(more)
        if external_tokens:
            promise = self.promises[req.request_id]
            if external_tokens != promise.tokens or external_tokens <= promise.local:
                raise Broken(f"asked to fill {external_tokens}, promised {promise.tokens} with {promise.local} local")
            promise.tables = tuple(tuple(row) for row in table)
        elif req.request_id in self.promises and not self.promises[req.request_id].tables:
            del self.promises[req.request_id]  # the local hit was better

    def plan(self, builder: PlanBuilder) -> PlanPart | Late | None:
        self._called("plan")
        jobs = []
        for request_id, promise in self.promises.items():
            if promise.tables and not promise.sent:
                promise.sent = True
                delay = self._rng.randrange(4) if promise.wait else 0
                jobs.append(
                    Job(
                        promise.number,
                        request_id,
                        promise.known,
                        promise.tables,
                        promise.local,
                        promise.tokens,
                        promise.good,
                        delay,
                    )
                )
        # An empty plan moves loads, holds and grammars under way while nothing runs.
        return Load(tuple(jobs)) if jobs or self.next_deadline() is not None else None

    def supply(self, plan: StepPlan) -> PlanPart | None:
        return None

    def on_commit(self, req: Request, first_block: int, block_hashes: Sequence[bytes]) -> None:
        self._called("on_commit")
        if list(req.block_hashes[first_block : first_block + len(block_hashes)]) != list(block_hashes):
            raise Broken("committed hashes are not the request's")

    def on_preempt(self, req: Request) -> None:
        self._called("on_preempt")
        self.tables.pop(req.request_id, None)
        promise = self.promises.get(req.request_id)
        if promise is not None and promise.wait and promise.sent:
            raise Broken("preempted while its blocks are being filled")
        self.promises.pop(req.request_id, None)
        self.poisoned.discard(req.request_id)

    def on_finish(self, req: Request) -> FinishHold:
        self._called("on_finish")
        self.alive.remove(req.request_id)
        self.retries.pop(req.request_id, None)
        self.grammar.pop(req.request_id, None)
        self.poisoned.discard(req.request_id)
        self.tables.pop(req.request_id, None)
        loading = req.request_id in self.promises and self.promises[req.request_id].sent
        if not loading:
            self.promises.pop(req.request_id, None)
        if not loading and self._rng.random() < 0.7:
            return FinishHold()
        blocks = self._kv.blocks(req.request_id)
        chain: list[int] = []
        extend(chain, req.tokens)
        certain = 0 if loading else min(len(self._snapshot(blocks, chain)), req.num_computed_tokens)
        self.holds[req.request_id] = (self._rng.randrange(5), blocks, chain[:certain])
        return FinishHold(True, (Note(f"held {req.request_id}"),))

    def _snapshot(self, blocks: Tables, chain: list[int]) -> list[int]:
        """The longest prefix of `chain` that the first group's blocks hold now."""
        size, table = self._memory.block_sizes[0], blocks[0]
        for i, value in enumerate(chain):
            if i // size >= len(table) or self._memory.blocks[table[i // size]][i % size] != value:
                return chain[:i]
        return chain

    def absorb(self, result: StepResult) -> Absorbed:
        self._called("absorb")
        ready = []
        for request_id in list(self.grammar):
            self.grammar[request_id] -= 1
            if self.grammar[request_id] < 0:
                del self.grammar[request_id]
                ready.append(Readiness(request_id))
        report = result.part(Done)
        loaded = set()
        for number, request_id, tokens in report.jobs if report is not None else ():
            promise = self.promises.get(request_id)
            if promise is None or promise.number != number:
                continue  # preempted since
            del self.promises[request_id]
            loaded.add(request_id)
            if request_id not in self.alive:
                continue
            error = "the tier broke" if tokens < promise.tokens and self._rng.random() < 0.2 else None
            ready.append(Readiness(request_id, tokens, error))
        ready.append(Readiness("nobody", 3))
        return Absorbed(tuple(ready), ("nobody", *self._let_go(loaded)))

    def _let_go(self, loaded: set[str]) -> list[str]:
        release = []
        for request_id, (left, blocks, chain) in list(self.holds.items()):
            if self._snapshot(blocks, chain) != chain:
                raise Broken(f"blocks held for {request_id} were given to somebody else")
            if request_id in self.promises and request_id not in loaded:
                continue
            if left > 0:
                self.holds[request_id] = (left - 1, blocks, chain)
                continue
            del self.holds[request_id]
            release.append(request_id)
        return release

    def next_deadline(self) -> float | None:
        return 0.0 if self.grammar or self.promises or self.holds or any(self.retries.values()) else None

    def close(self) -> None:
        return None

    def settled(self) -> bool:
        return not self.promises and not self.holds

    def reset(self) -> bool:
        return not self.promises

    def stats(self) -> dict[str, Any]:
        return {"holds": float(len(self.holds))}


class DataHalf:
    """Fills blocks as the control half says.

    Owns: the loads under way.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._running: list[tuple[int, int, str, int]] = []  # delay, job, request id, tokens there

    def submit(self, plan: StepPlan) -> frozenset[str]:
        """Start the plan's loads; ids of those that will not bring all they promised."""
        load = plan.part(Load)
        short = set()
        for job in load.jobs if load is not None else ():
            chain: list[int] = []
            extend(chain, job.tokens)
            there = max(job.start, job.good)
            self._memory.write(job.tables, job.start, chain[job.start : there] + [0] * (job.end - there))
            if there < job.end:
                short.add(job.request_id)
            self._running.append((job.delay, job.number, job.request_id, there))
        return frozenset(short)

    def report(self) -> tuple[ResultPart, ...]:
        """Loads that are done by the end of this step."""
        done = tuple((number, i, n) for delay, number, i, n in self._running if delay <= 0)
        self._running = [(delay - 1, number, i, n) for delay, number, i, n in self._running if delay > 0]
        return (Done(done),) if done else ()
