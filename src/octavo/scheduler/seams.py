"""How features join the scheduler: two protocols, and the null objects that stand in for them.

Promises: a feature needs no edit in `schedule()` or `apply()`.
Does not know: any feature.

`handshake` is called once, before anything else. Order of calls for one request's life on a `ControlPart`:
`on_arrival` once -> `match` each time the request is about to be admitted without KV of its own ->
`after_reserve` each time blocks were given -> `plan` once a step -> `on_commit` as blocks fill ->
`absorb` once a result -> `on_finish` once. A preemption brings it back to `match`.

For a `Constraint`: `applies` once, on arrival -> `wait` and `crowd` while it waits -> `admits` each time it is about to be admitted, before any
lookup -> `cap` -> `commit`, when it got its blocks too -> `undo` if it is dropped again -> `forget` once.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from octavo.base.outputs import OutputPart
from octavo.base.step import PlanPart, StepPlan, StepResult
from octavo.base.types import RequestState
from octavo.kvcache.hashing import BlockHash
from octavo.kvcache.prefix import CacheEvent

if TYPE_CHECKING:
    from octavo.scheduler.plan_builder import PlanBuilder
    from octavo.scheduler.request import Request

log = logging.getLogger(__name__)


class Wait(Protocol):
    """What requests wait for: equal ones are held together and asked once, however many wait."""

    def over(self) -> bool:
        """True when those who wait may be looked at again."""

    def __hash__(self) -> int: ...


class Constraint(Protocol):
    """A rule that may lower how many tokens a request gets in this step, never raise it.

    Lower `rank` goes first; alignment ranks last and must be idempotent.
    Step-wide limits (paused, throttled) belong to the budget, not here.
    `limits_decode` says whether it is asked of requests that decode one token a step too; rules that only matter
    on admission and for prompt chunks say False and cost such requests nothing.
    """

    rank: int
    limits_decode: bool

    def applies(self, req: "Request") -> bool:
        """Asked once, when the request is added; False keeps the hot path free of this rule."""

    def wait(self, req: "Request") -> Wait | None:
        """What a waiting request waits for before it is even looked at; None: it may be looked at now."""

    def crowd(self, req: "Request") -> BlockHash | None:
        """The beginning, by hash, that only one of those who have it computes, while it is in no cache; None: none."""

    def admits(self, req: "Request", builder: "PlanBuilder") -> bool:
        """May a waiting request be looked at in this step? False passes over it before its prefix is looked up."""

    def cap(self, req: "Request", n: int, builder: "PlanBuilder") -> int:
        """At most this many tokens after `req.num_computed_tokens`; 0 means 'not in this step'. Changes nothing."""

    def commit(self, req: "Request", n: int, builder: "PlanBuilder") -> None:
        """The request got `n` tokens: take what the rule counts."""

    def undo(self, req: "Request", builder: "PlanBuilder") -> None:
        """The request was dropped from the plan being built: give back exactly what `commit` took."""

    def forget(self, req: "Request") -> None:
        """The request ended."""


def wait_of(req: "Request") -> Wait | None:
    """What the request waits for by the first rule that holds it."""
    for rule in req.constraints:
        wait: Wait | None = rule.wait(req)
        if wait is not None:
            return wait
    return None


class Match(msgspec.Struct, frozen=True):
    """KV that a part can bring, counted from the start of the request.

    `tokens` is the whole prefix length the part can provide (0: nothing); of the last token's KV no use is made,
    since it is computed for its logits. With `wait`, the request parks
    in WAITING_KV after its blocks were reserved, until `absorb` reports it ready.
    `source` is where it comes from, for people. Where several bring it, `shares` says in order up to which token
    each does: ((512, "host"), (768, "file")).
    """

    tokens: int = 0
    wait: bool = False
    source: str = ""
    shares: tuple[tuple[int, str], ...] = ()


class Retry(msgspec.Struct, frozen=True):
    """The part does not know yet: ask again in a later step, let others pass.

    If nothing else runs, that step comes when `next_deadline` says.
    """


class Readiness(msgspec.Struct, frozen=True):
    """What `absorb` says of a request that is parked, or runs with KV that was promised without waiting.

    `num_tokens` is how much of the prefix is really there, counted from its start: less than promised means
    the rest is recomputed. A running request that got less than promised is preempted.
    `error` ends the request.
    """

    request_id: str
    num_tokens: int = 0
    error: str | None = None


class Absorbed(msgspec.Struct, frozen=True):
    """What a part took from a result: requests to wake and requests whose held blocks may go."""

    ready: tuple[Readiness, ...] = ()
    release: tuple[str, ...] = ()


class FinishHold(msgspec.Struct, frozen=True):
    """Answer to `on_finish`: keep the blocks until `Absorbed.release` names the id, and what to tell the client."""

    holds_blocks: bool = False
    parts: tuple[OutputPart, ...] = ()


class Late(msgspec.Struct, frozen=True):
    """Answer to `plan`: this part's share depends on tokens still in flight and follows through `supply`."""

    kind: str  # name of the PlanPart type, as in StepPlan.late


class ControlPart(Protocol):
    """The control half of a feature."""

    name: str

    def handshake(self, offered: Mapping[str, Any]) -> None:
        """What this feature's other half offers for other engines to know (`DataPart.handshake`)."""

    def on_arrival(self, req: "Request") -> RequestState:
        """A request arrived. Return WAITING, or the state it must park in until `absorb` readies it."""

    def match(self, req: "Request", local_tokens: int) -> "Match | Retry":
        """How much of the prefix can this part bring, given `local_tokens` found in the local cache?"""

    def after_reserve(self, req: "Request", block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        """Blocks (by group) were reserved; the first `external_tokens` tokens are this part's to fill."""

    def plan(self, builder: "PlanBuilder") -> PlanPart | Late | None:
        """The part's share of the plan that is being sealed; also asked when nothing runs."""

    def supply(self, plan: StepPlan) -> PlanPart | None:
        """The late share of a plan in flight; asked once every earlier step has been applied."""

    def on_commit(self, req: "Request", first_block: int, block_hashes: Sequence[bytes]) -> None:
        """Blocks became full and findable: `first_block` is the index in the request of the first hash."""

    def on_preempt(self, req: "Request") -> None:
        """The request lost its blocks and will come back to `match`."""

    def on_finish(self, req: "Request") -> FinishHold:
        """The request ended; may hold its blocks."""

    def absorb(self, result: StepResult) -> Absorbed:
        """Read this part's report from a result."""

    def next_deadline(self) -> float | None:
        """Monotonic second by which the loop must tick again even when idle; None: no need."""

    def settled(self) -> bool:
        """False while something is under way that an engine about to end should wait for, for a while."""

    def reset(self) -> bool:
        """Forget cached content; False when something is under way that forbids it."""

    def take_events(self) -> tuple[CacheEvent, ...]:
        """Blocks that this part can bring, or no longer can, since it was asked last; asked where events are told
        (`--kv-events`)."""

    def stats(self) -> dict[str, Any]:
        """Figures for metrics."""

    def close(self) -> None:
        """The engine ends, and no call comes after this. What is still under way is lost: say so."""


class NullControlPart:
    """The part that does nothing: where no feature is installed.

    Owns: nothing.
    """

    name = "null"

    def handshake(self, offered: Mapping[str, Any]) -> None:
        return None

    def on_arrival(self, req: "Request") -> RequestState:
        return RequestState.WAITING

    def match(self, req: "Request", local_tokens: int) -> "Match | Retry":
        return Match()

    def after_reserve(self, req: "Request", block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        return None

    def plan(self, builder: "PlanBuilder") -> PlanPart | Late | None:
        return None

    def supply(self, plan: StepPlan) -> PlanPart | None:
        return None

    def on_commit(self, req: "Request", first_block: int, block_hashes: Sequence[bytes]) -> None:
        return None

    def on_preempt(self, req: "Request") -> None:
        return None

    def on_finish(self, req: "Request") -> FinishHold:
        return FinishHold()

    def absorb(self, result: StepResult) -> Absorbed:
        return Absorbed()

    def next_deadline(self) -> float | None:
        return None

    def settled(self) -> bool:
        return True

    def reset(self) -> bool:
        return True

    def take_events(self) -> tuple[CacheEvent, ...]:
        return ()

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        return None


def close_all(parts: Sequence[ControlPart]) -> None:
    """End each of them, whatever another does (TIR-21)."""
    for part in parts:
        try:
            part.close()
        except Exception as problem:  # the border between one part's end and everybody else's
            log.warning("%s did not end well: %s", part.name, problem)
