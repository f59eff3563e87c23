"""Choose which tokens run next.

Promises: there is no prefill phase and no decode phase: every request has tokens that exist and tokens that are
computed, and each step moves the second number toward the first. Pure bookkeeping: no tensors, no I/O, and no
clock but the one passed in (SCH-4).
Does not know: any feature; they join through `seams`.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from octavo.base.outputs import StatsSnapshot
from octavo.base.requests import EngineRequest
from octavo.base.step import Ints, PlanPart, StepPlan, as_ints
from octavo.base.types import FinishReason, RequestState
from octavo.kvcache.hashing import BlockHasher, HashChain
from octavo.kvcache.manager import KVCacheManager, PrefixHit
from octavo.scheduler.describe import batch_lines, state_lines
from octavo.scheduler.ledger import Ledger
from octavo.scheduler.limits import MAX_PROMPTS_SIDE_BY_SIDE, SchedulerLimits, fair_needs, fair_prefill_chunk
from octavo.scheduler.order import Order
from octavo.scheduler.plan_builder import PlanBuilder, TokenBudget
from octavo.scheduler.request import Request, Rule
from octavo.scheduler.seams import Constraint, ControlPart, Late, Retry, close_all, wait_of


class _Found(msgspec.Struct, frozen=True):
    """What is there of a waiting request's prefix: `local` tokens on the device, `total` with what `part` brings."""

    local: int
    total: int
    hit: PrefixHit | None = None
    part: ControlPart | None = None
    source: str = ""
    shares: tuple[tuple[int, str], ...] = ()
    wait: bool = False


class Scheduler:
    """Decides what each step computes.

    `schedule` may be called again before earlier plans came back: tokens that they will sample are counted as
    placeholders (SCH-31). All block sizes are multiples of `hash_block_size`.
    With `debug`, every invariant is checked after every step.

    Owns: the last step's number, whether admission is paused, who last found no room at the head of the queue and at
    how many free blocks, and the slots of the last batch. Everything about requests is the ledger's.
    """

    def __init__(
        self,
        *,
        limits: SchedulerLimits,
        kv: KVCacheManager,
        order: Order,
        parts: Sequence[ControlPart],
        constraints: Sequence[Constraint],
        hasher: BlockHasher,
        hash_block_size: int,
        num_groups: int,
        clock: Callable[[], float],
        debug: bool = False,
    ) -> None:
        self._limits = limits
        self._kv = kv
        self._order = order
        self._parts = tuple(parts)
        self._constraints = tuple(sorted(constraints, key=lambda rule: rule.rank))
        self._hasher = hasher
        self._hash_block_size = hash_block_size
        self._num_groups = num_groups
        self._clock = clock
        self._debug = debug
        self._seq = 0
        self._paused = False
        self._full_at: tuple[Request | None, int] = (None, 0)
        self._last_rows: list[Request] = []
        self._last_slots = as_ints([])
        self.ledger = Ledger(kv=kv, order=order, parts=parts, num_slots=limits.max_num_seqs, clock=clock)

    # ---- requests ---------------------------------------------------------------------------

    def add(self, req: EngineRequest) -> None:
        """Queue a request. Raises `ClientError` when its id is alive or its prompt leaves no room in the context."""
        chain = HashChain(self._hasher, self._hash_block_size, req)
        record = Request(
            req, chain, block_size=self._hash_block_size, max_model_len=self._limits.max_model_len, now=self._clock()
        )
        self.ledger.welcome(record)
        record.obey([rule for rule in self._constraints if rule.applies(record)])

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests now; the last delta of each comes with the next outputs. Unknown ids are ignored."""
        for request_id in request_ids:
            req = self.ledger.requests.get(request_id)
            if req is not None:
                self.ledger.dismiss(req, FinishReason.ABORT)

    # ---- the step ---------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step; None when there is nothing to do."""
        order, builder = self._order, self._open()
        budget = builder.budget
        for req in order.running:
            if budget.left <= 0:
                break
            if builder.add_decode(req):
                continue
            while not self._place(req, builder):
                builder.short = True
                if self.ledger.blocks_on_their_way:
                    break  # what ended or was preempted frees blocks soon: better to wait than to take more
                victim = order.victim()
                if victim is req and req.num_placeholders:
                    break  # its token in flight would be lost, and it be admitted to the same place again, for ever
                self._preempt(victim, builder)
                if victim is req:
                    break
        if not builder.short and not self._paused:
            order.recall()
            while min(budget.left, budget.prompts) > 0 and len(order.running) < self._limits.max_running:
                waiting = order.peek()
                if waiting is None or not self._admit(waiting, builder):
                    break
        return self._seal(builder)

    def _open(self) -> PlanBuilder:
        limits, running, in_prompt = self._limits, self._order.running, self.ledger.in_prompt
        self._order.release()
        tokens = limits.max_num_scheduled_tokens
        prompts = prefill_chunk = tokens - len(running) + len(in_prompt)
        others = self._order.num_waiting and not self._paused
        if in_prompt or others:
            needs = [req.num_pending_tokens for req in in_prompt]
            if others and not self._full():
                room = min(limits.max_running - len(running), MAX_PROMPTS_SIDE_BY_SIDE)
                needs += fair_needs(self._order.sift(room, wait_of), self._kv.is_findable)
            if len(needs) > 1:
                prefill_chunk = max(limits.min_prefill_chunk, fair_prefill_chunk(needs, prompts))
        budget = TokenBudget(tokens, limits.max_num_batched_tokens, prefill_chunk=prefill_chunk, prompts=prompts)
        return PlanBuilder(self._seq + 1, budget, self._kv, num_in_flight=len(self.ledger.flights))

    def _full(self) -> bool:
        """The head of the queue found no room, and no block has come back since."""
        head, free = self._full_at
        return head is not None and head is self._order.peek() and self._kv.num_free_blocks <= free

    def _place(self, req: Request, builder: PlanBuilder) -> bool:
        """Give a running request its tokens, if there are any to give. False: no blocks."""
        known = req.num_tokens + req.num_placeholders
        n = known - req.num_computed_tokens
        if req.num_placeholders and known >= req.max_total_tokens:
            return True  # what is in flight ends it
        return n <= 0 or self._place_any(req, n + req.num_drafts, builder)

    def _place_any(self, req: Request, n: int, builder: PlanBuilder) -> bool:
        in_prompt = req in self.ledger.in_prompt
        rules = req.constraints if in_prompt else req.decode_constraints
        n = self._cap(req, n, rules, in_prompt, builder)
        if n <= 0:
            return True
        # A part may fill blocks out of order: those a window has passed are safe only once no step in flight reads them.
        settled = self.ledger.num_settled_tokens(req) if self._parts else req.num_computed_tokens
        if not builder.try_add(req, n, in_prompt=in_prompt, constraints=rules, num_settled_tokens=settled):
            return False
        self._tell_reserved(req, builder)
        if in_prompt and req.num_computed_tokens >= req.num_tokens:
            self.ledger.leave_prompt(req)
        return True

    def _cap(self, req: Request, n: int, rules: tuple[Rule, ...], in_prompt: bool, builder: PlanBuilder) -> int:
        n = builder.budget.cap(n, req.num_drafts, in_prompt)
        for rule in rules:
            if n <= 0:
                break
            n = min(n, rule.cap(req, n, builder))
        return n

    def _preempt(self, req: Request, builder: PlanBuilder) -> None:
        builder.drop(req)
        self.ledger.preempt(req)
        builder.preempted.append(req)

    # ---- admission --------------------------------------------------------------------------

    def _admit(self, req: Request, builder: PlanBuilder) -> bool:
        """Look at the head of the queue: it enters, parks, is passed over, or ends. False: it blocks the queue."""
        if req.state is RequestState.PREEMPTED:
            req.move(RequestState.WAITING)
        if (wait := wait_of(req)) is not None:
            self._order.hold(wait)
            return True
        found = None
        if all(rule.admits(req, builder) for rule in req.constraints):
            found = self._look_up(req)
        if found is None:
            self._order.skip()
            return True
        if found.wait and found.part is not None:
            return self._park(req, found, found.part)
        if not req.holds_blocks:
            req.start_from(found.total)
        n = self._cap(req, req.num_tokens - found.total, req.constraints, True, builder)
        if n <= 0:
            self._order.skip()
        elif builder.try_add(
            req,
            n,
            in_prompt=True,
            constraints=req.constraints,
            hit=found.hit,
            external_tokens=found.total - found.local,
            admission=True,
            beside_others=bool(self._order.running),
        ):
            self._enter(req, found, builder)
            return True
        if not req.holds_blocks:
            req.start_from(0)
        return n <= 0 or self._make_room(req)

    def _look_up(self, req: Request) -> _Found | None:
        """The longest prefix there is: a part's offer counts when it beats the local hit (SCH-13). None: retry."""
        if req.holds_blocks:
            return _Found(req.num_computed_tokens, req.num_computed_tokens)
        hit = self._kv.match(req, req.lookup)
        local = hit.num_tokens
        best = _Found(local, local, hit)
        # Who must compute every prompt token, to score it, has no use for what others computed.
        for part in self._parts if req.reads_prefix_cache else ():
            match = part.match(req, local)
            if isinstance(match, Retry):
                return None
            total = min(match.tokens, req.num_tokens - 1)  # the last token is computed, for its logits (SCH-23)
            if total > best.total:
                best = _Found(local, total, hit, part, match.source, match.shares, match.wait)
        return best

    def _enter(self, req: Request, found: _Found, builder: PlanBuilder) -> None:
        """It got its tokens and blocks: from now on it runs."""
        had_blocks = found.hit is None
        blocks = self._kv.blocks(req.request_id) if had_blocks else builder.reserved(req)
        self.ledger.admit(req, builder.seq)
        builder.new.append((req, blocks))
        if not had_blocks:
            req.note_cached(found.local, found.source, found.total - found.local, found.shares)
            req.promise(found.total if found.part is not None else 0)
        self._tell_reserved(req, builder, found.part, found.total)
        if req.num_computed_tokens >= req.num_tokens:
            self.ledger.leave_prompt(req)

    def _park(self, req: Request, found: _Found, part: ControlPart) -> bool:
        """Reserve the blocks that `part` will fill, and wait for it outside the queues."""
        reservation = self._kv.reserve(
            req,
            0,
            hit=found.hit,
            external_tokens=found.total - found.local,
            admission=True,
            beside_others=bool(self._order.running),
        )
        if reservation is None:
            return self._make_room(req)
        self._order.pop()
        req.start_from(found.local)
        req.reserved(found.total)
        req.promise(found.total, found.source, found.shares)
        self.ledger.park(req, part)
        for each in self._parts:
            each.after_reserve(req, reservation.new_blocks, found.total if each is part else 0)
        return True

    def _tell_reserved(
        self, req: Request, builder: PlanBuilder, filler: ControlPart | None = None, external_tokens: int = 0
    ) -> None:
        if not self._parts or not any(blocks := builder.reserved(req)):
            return
        for part in self._parts:
            part.after_reserve(req, blocks, external_tokens if part is filler else 0)

    def _make_room(self, req: Request) -> bool:
        """The head of the queue found no blocks. True: look at the queue again; False: it must wait."""
        ledger = self.ledger
        self._full_at = (req, self._kv.num_free_blocks)
        if self._order.running or ledger.blocks_on_their_way or ledger.held:
            return False
        if any(other.waits_for and other.holds_blocks for other in ledger.requests.values()):
            return False  # loads under way; their requests run and end
        holders = [other for other in self._order.waiting() if other.holds_blocks and other is not req]
        if holders:
            ledger.strip(holders[-1])  # nobody runs: without this all could wait for each other's blocks
        elif req.holds_blocks:
            ledger.strip(req)
        else:
            error = (
                f"the request needs more KV memory than there is: its {req.num_tokens} tokens do not fit in "
                f"{self._kv.num_total_blocks} blocks; shorten it, or give the engine more KV blocks"
            )
            ledger.dismiss(req, FinishReason.ERROR, error)
        return True

    # ---- the plan ---------------------------------------------------------------------------

    def _seal(self, builder: PlanBuilder) -> StepPlan | None:
        ledger = self.ledger
        answers = [(part, part.plan(builder)) for part in self._parts]
        shares = tuple(answer for _, answer in answers if isinstance(answer, PlanPart))
        late = [(part, answer.kind) for part, answer in answers if isinstance(answer, Late)]
        if not builder.rows and not shares and not late:
            ledger.found_nothing(but_changed=bool(builder.preempted))
            return None
        slots, (finished, preempted) = self._slots(builder), ledger.take_slots()
        plan = builder.seal(
            slots=slots,
            finished=finished,
            preempted=preempted,
            parts=shares,
            late=tuple(kind for _, kind in late),
            num_groups=self._num_groups,
        )
        self._seq = builder.seq
        ledger.launch(builder.seq, builder.rows, builder.num_computed_tokens, tuple(part for part, _ in late))
        if self._debug:
            ledger.check()
        return plan

    def _slots(self, builder: PlanBuilder) -> Ints:
        """Slots of the rows; the array of the last batch again when the rows are the same."""
        if builder.new or builder.rows != self._last_rows:
            self._last_slots = as_ints([req.slot for req in builder.rows])
            self._last_rows = builder.rows
        return self._last_slots

    def supply(self, plan: StepPlan) -> tuple[PlanPart, ...]:
        """The late parts of a plan in flight, once every step before it has been applied."""
        shares = (part.supply(plan) for part in self.ledger.flights[plan.seq].late)
        return tuple(share for share in shares if share is not None)

    # ---- the loop's questions ---------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return len(self._order.running)

    @property
    def num_waiting(self) -> int:
        """Requests that are alive and do not run, parked ones included."""
        return len(self.ledger.requests) - self.num_running

    def has_work(self) -> bool:
        """True when `schedule` may find something, or deltas wait. Parked and blocked requests are no work."""
        if self.ledger.deltas:
            return True
        return not self.ledger.stuck and bool(self._order.running or self._order.num_waiting)

    def next_deadline(self) -> float | None:
        """Monotonic second by which `schedule` must be called even if nothing happens; None: no need."""
        if not self._parts:
            return None
        return min((at for part in self._parts if (at := part.next_deadline()) is not None), default=None)

    def settled(self) -> bool:
        """True when no part has anything under way that is worth waiting for at the end."""
        return all(part.settled() for part in self._parts)

    def pause(self) -> None:
        """Admit nobody; those running go on."""
        self._paused = True

    def resume(self) -> None:
        """Admit again."""
        self._paused = False
        self.ledger.look_again()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content, with requests running (SCH-28): these keep what they have and share no more.

        True when nothing computed before can be found by a later request, here or in a part.
        """
        parts_done = [part.reset() for part in self._parts]
        return self._kv.reset_prefix_cache() and all(parts_done)

    def describe(self, plan: StepPlan | None) -> list[str]:
        """The state of this moment and the rows of `plan`, for people; from any thread (see `describe`)."""
        running, waiting = list(self._order.running), list(self._order.waiting())
        others = max(0, len(self.ledger.requests) - len(running) - len(waiting))
        lines = state_lines(running, waiting, others, self._kv.stats(), paused=self._paused, now_s=self._clock())
        slots = {req.slot: req.request_id for req in running if req.slot is not None}
        return lines if plan is None else [*batch_lines(plan, slots), *lines]

    def close(self) -> None:
        """Parts end."""
        close_all(self._parts)

    def stats(self) -> StatsSnapshot:
        """Counters and gauges of this moment."""
        return self.ledger.stats()
