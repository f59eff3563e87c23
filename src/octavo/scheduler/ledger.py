"""Every live request, its slot, and the one way each of them leaves.

Promises: a request that ends or is preempted gives back its slot, its blocks and its place in the queue, and every
part hears of it; a request that ended is in no table.
Does not know: how a step is chosen, or what a result says.

Scheduler and applier work on one ledger, on one thread.
"""

import logging
from collections.abc import Callable, Sequence

from octavo.base.errors import ClientError
from octavo.base.outputs import OutputPart, RequestDelta, StatsSnapshot
from octavo.base.step import LogprobArrays, PromptLogprobs
from octavo.base.types import FinishReason, RequestState
from octavo.kvcache.manager import KVCacheManager
from octavo.kvcache.policies import NULL_BLOCK
from octavo.scheduler.order import Order
from octavo.scheduler.records import Counters, Flight, HeldBlocks
from octavo.scheduler.request import Request
from octavo.scheduler.seams import ControlPart, FinishHold, Readiness

log = logging.getLogger(__name__)


class Ledger:
    """The state that scheduling and applying share.

    `applied_seq` is the last step that came back; `fence` the last step whose return gives blocks back.
    `stuck` says that scheduling found nothing to do and nothing has changed since.

    Owns: the table of requests, slots, who is in its prompt, flights, held blocks, deltas that wait for the next
    outputs, slots that the worker must drop, and counters. Queues are the order's, blocks the manager's.
    """

    def __init__(
        self,
        *,
        kv: KVCacheManager,
        order: Order,
        parts: Sequence[ControlPart],
        num_slots: int,
        clock: Callable[[], float],
    ) -> None:
        self.kv = kv
        self.order = order
        self.parts = tuple(parts)
        self.clock = clock
        self.requests: dict[str, Request] = {}
        self.in_prompt: dict[Request, None] = {}  # running, prompt not yet computed; in order of admission
        self.flights: dict[int, Flight] = {}
        self.held: dict[str, HeldBlocks] = {}
        self.deltas: list[RequestDelta] = []
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.finished_slots: list[int] = []
        self.preempted_slots: list[int] = []
        self.applied_seq = 0
        self.fence = 0
        self.stuck = False
        self.counters = Counters()

    # ---- coming in --------------------------------------------------------------------------

    def welcome(self, req: Request) -> None:
        """Enter a request: queue it, or park it for the parts that ask for it.

        Raises `ClientError` when the id is alive, or what a part raises; then nothing of it stays.
        """
        if req.request_id in self.requests or req.request_id in self.held:
            raise ClientError(f"request id {req.request_id!r} is in use; wait for its end or choose another")
        told: list[ControlPart] = []
        try:
            for part in self.parts:
                state = part.on_arrival(req)
                told.append(part)
                if state is not RequestState.WAITING:
                    req.wait_for(part.name)
                    self._park_as(req, state)
        except Exception:
            for part in told:
                part.on_finish(req)
            raise
        self.requests[req.request_id] = req
        self.stuck = False
        if not req.waits_for:
            req.move(RequestState.WAITING)
            self.order.push(req)

    def _park_as(self, req: Request, state: RequestState) -> None:
        if req.state is RequestState.NEW:
            req.move(state)

    def park(self, req: Request, part: ControlPart) -> None:
        """Out of the queues until `part` says that its KV is there."""
        req.wait_for(part.name)
        req.move(RequestState.WAITING_KV)

    def wake(self, ready: Readiness, part: ControlPart) -> None:
        """A part says that a request may go on, with as much of the prefix as is really there."""
        req = self.requests.get(ready.request_id)
        if req is None:
            return
        self.stuck = False
        if ready.error is not None:
            self.dismiss(req, FinishReason.ERROR, ready.error)
            return
        if req.state is RequestState.RUNNING:
            if ready.num_tokens < req.promised_tokens:
                self.preempt(req)
            return
        if part.name not in req.waits_for:
            return
        req.heard_from(part.name)
        if req.holds_blocks:
            self._adopt(req, ready.num_tokens, part)
        if not req.waits_for:
            req.move(RequestState.WAITING)
            self.order.push(req)

    def _adopt(self, req: Request, num_tokens: int, part: ControlPart) -> None:
        """Loaded KV counts as computed here."""
        local = req.num_computed_tokens
        there = max(local, min(num_tokens, req.promised_tokens))
        if there < req.promised_tokens and any(NULL_BLOCK in row for row in self.kv.blocks(req.request_id)):
            self.strip(req)  # the missing tokens cannot be computed: a window was counted as passed
            return
        req.note_cached(local, req.promised_source or part.name, there - local, req.promised_shares)
        self.commit(req, there)
        req.start_from(there)
        req.promise(0)

    def commit(self, req: Request, num_certain_tokens: int) -> None:
        """Make full blocks findable, and tell the parts of those that are new (SCH-25)."""
        first, hashes = self.kv.commit(req, num_certain_tokens)
        if hashes:
            for part in self.parts:
                part.on_commit(req, first, hashes)

    # ---- running ----------------------------------------------------------------------------

    def admit(self, req: Request, seq: int) -> None:
        """The head of the queue runs from step `seq` on: a slot has one owner, which is in its prompt at first."""
        req.run(self.free_slots.pop(), seq, self.clock())
        self.order.admit()
        self.in_prompt[req] = None

    def leave_prompt(self, req: Request) -> None:
        """All of its prompt is in a step. Raises `KeyError` for one that was not in its prompt."""
        del self.in_prompt[req]
        req.leave_prompt()

    # ---- going out --------------------------------------------------------------------------

    def finish(
        self,
        req: Request,
        reason: FinishReason,
        *,
        new_token_ids: tuple[int, ...] = (),
        stop_reason: int | None = None,
        logprobs: LogprobArrays | None = None,
        prompt_logprobs: tuple[PromptLogprobs, ...] = (),
        error: str | None = None,
    ) -> RequestDelta:
        """End a request, whatever it was doing; its last delta."""
        del self.requests[req.request_id]
        self._leave_queues(req)
        slot = req.slot
        req.end(reason, self.clock())
        if slot is not None:
            self.free_slots.append(slot)
            self.finished_slots.append(slot)
        parts = self._farewell(req)
        for rule in req.constraints:
            rule.forget(req)
        self.counters.ended(reason)
        self.stuck = False
        return RequestDelta(
            request_id=req.request_id,
            new_token_ids=new_token_ids,
            finish=reason,
            stop_reason=stop_reason,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=req.num_cached_tokens,
            cached_by_source=req.cached_by_source,
            num_preemptions=req.num_preemptions,
            error=error,
            times=req.times.snapshot(),
            parts=parts,
        )

    def dismiss(self, req: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request that no result ended; its last delta waits for the next outputs."""
        self.deltas.append(self.finish(req, reason, error=error))

    def _leave_queues(self, req: Request) -> None:
        self.order.remove(req)
        self.in_prompt.pop(req, None)

    def _farewell(self, req: Request) -> tuple[OutputPart, ...]:
        """Ask the parts, then give the blocks back, or keep them for who holds them."""
        holders: set[str] = set()
        outputs: list[OutputPart] = []
        for part in self.parts:
            hold = self._ask_to_hold(part, req)
            outputs.extend(hold.parts)
            if hold.holds_blocks:
                holders.add(part.name)
        if holders:
            self.held[req.request_id] = HeldBlocks(holders, req.last_seq)
        else:
            self.kv.release(req.request_id, after=self._after(req.last_seq))
        return tuple(outputs)

    def _ask_to_hold(self, part: ControlPart, req: Request) -> FinishHold:
        try:
            return part.on_finish(req)
        except Exception:  # the border around one request: its end must not be the end of the others
            log.exception("part %s failed at the end of request %s", part.name, req.request_id)
            return FinishHold()

    def let_go(self, request_id: str, part: ControlPart) -> None:
        """A part no longer needs the blocks of a request that ended."""
        held = self.held.get(request_id)
        if held is None:
            return
        if held.let_go(part.name):
            del self.held[request_id]
            self.kv.release(request_id, after=self._after(held.last_seq))
            self.stuck = False

    def _after(self, last_seq: int) -> int | None:
        """The step to wait for before blocks are given to others: None when it has come back (SCH-32)."""
        if last_seq <= self.applied_seq:
            return None
        self.fence = max(self.fence, last_seq)
        return last_seq

    def preempt(self, req: Request) -> None:
        """Take a running request's slot and blocks; it will be computed again (SCH-30).

        Steps run in order, so its blocks can be given away at once, unless a part may fill them out of order.
        """
        self._leave_queues(req)
        if req.slot is not None:
            self.free_slots.append(req.slot)
            self.preempted_slots.append(req.slot)
        self.kv.release(req.request_id, after=self._after(req.last_seq) if self.parts else None)
        req.preempt(self.clock())
        self.counters.preempted()
        self.stuck = False
        for part in self.parts:
            part.on_preempt(req)
        self.order.push(req)

    def strip(self, req: Request) -> None:
        """Take the blocks of a waiting request; it will look for its prefix again."""
        self.kv.release(req.request_id, after=self._after(req.last_seq) if self.parts else None)
        req.lose_blocks()
        for part in self.parts:
            part.on_preempt(req)

    # ---- steps ------------------------------------------------------------------------------

    @property
    def blocks_on_their_way(self) -> bool:
        """Blocks were given back and become free when a step in flight returns."""
        return self.fence > self.applied_seq

    def take_slots(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Slots of who ended and of who was preempted, for the worker to drop: each is told once, in the next plan."""
        finished, preempted = tuple(self.finished_slots), tuple(self.preempted_slots)
        self.finished_slots.clear()
        self.preempted_slots.clear()
        return finished, preempted

    def launch(self, seq: int, rows: list[Request], starts: list[int], late: tuple[ControlPart, ...]) -> None:
        """Step `seq` is submitted with these rows, each from its start; it stays in the table until `retire`."""
        self.flights[seq] = Flight(rows, starts, late, self.clock())

    def found_nothing(self, *, but_changed: bool) -> None:
        """Scheduling has nothing to do until something changes, unless it changed something itself."""
        self.stuck = not but_changed

    def look_again(self) -> None:
        """Something changed."""
        self.stuck = False

    def retire(self, seq: int) -> Flight:
        """Step `seq` has come back."""
        self.applied_seq = seq
        self.kv.retire(seq)
        self.stuck = False
        return self.flights.pop(seq)

    def num_settled_tokens(self, req: Request) -> int:
        """Computed tokens that no step in flight computes."""
        for seq, flight in self.flights.items():
            if seq >= req.valid_from and req in flight.rows:
                return flight.num_computed_tokens[flight.rows.index(req)]
        return req.num_computed_tokens

    def take_deltas(self) -> list[RequestDelta]:
        """What waits for the next outputs."""
        deltas, self.deltas = self.deltas, []
        return deltas

    def stats(self) -> StatsSnapshot:
        """Counters and gauges of this moment."""
        kv, counters = self.kv.stats(), self.counters
        num_running = len(self.order.running)
        return StatsSnapshot(
            seq=self.applied_seq,
            num_running=num_running,
            num_waiting=len(self.requests) - num_running,
            num_blocks_total=kv.num_total_blocks,
            num_blocks_used=kv.num_total_blocks - kv.num_free_blocks,
            kv_usage=kv.usage,
            prefix_queries=kv.prefix_queries,
            prefix_hits=kv.prefix_hits,
            prefix_resumed=kv.prefix_resumed,
            prefix_shared=kv.prefix_shared,
            preemptions=counters.preemptions,
            prompt_tokens=counters.prompt_tokens,
            output_tokens=counters.output_tokens,
            finished=dict(counters.finished),
            step_tokens=counters.step_tokens,
            step_rows=counters.step_rows,
            step_s=counters.step_s,
            parts={part.name: dict(part.stats()) for part in self.parts},
        )

    def check(self) -> None:
        """Raise `RuntimeError` when an invariant is broken; for tests and debug mode."""
        self.kv.check()
        for req in self.requests.values():
            req.check()
        running = self.order.running
        slots = [req.slot for req in running]
        if len(set(slots)) != len(slots) or set(slots) & set(self.free_slots):
            raise RuntimeError(f"a slot is owned twice: {sorted(map(str, slots))}, free {sorted(self.free_slots)}")
        queued = len(running) + self.order.num_waiting + sum(1 for r in self.requests.values() if r.waits_for)
        if queued != len(self.requests):
            raise RuntimeError(f"{len(self.requests)} requests are alive, but {queued} are in a queue or parked")
        for req in self.in_prompt:
            if req.state is not RequestState.RUNNING:
                raise RuntimeError(f"{req!r} is not running, but counted as being in its prompt")
