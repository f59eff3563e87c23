"""Prefill here and decode there: both sides of a hand-over as one part of the scheduler (PDX-1 .. PDX-5).

Promises: an idle engine keeps ticking while leases or fetches are under way.
Does not know: what its sides do (see `producer` and `consumer`), sockets or bytes (see `features.transfer.data`), or who
routes requests.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from octavo.base.errors import ConfigError
from octavo.base.step import PlanPart, StepPlan, StepResult
from octavo.base.types import RequestState
from octavo.features.transfer.address import parse_listen
from octavo.features.transfer.control.consumer import Consumer, OnFailure
from octavo.features.transfer.control.producer import Producer
from octavo.features.transfer.disagg import DisaggPlan, DisaggReport, LeaseNews, TransferRole
from octavo.features.transfer.options import TransferOptions
from octavo.kvcache.prefix import CacheEvent
from octavo.plugins.features import ControlContext
from octavo.scheduler.seams import Absorbed, FinishHold, Late, Match, Readiness, Retry

if TYPE_CHECKING:
    from octavo.scheduler.plan_builder import PlanBuilder
    from octavo.scheduler.request import Request

FETCH_POLL_S: Final = 0.002  # how often reports are asked for while a fetch is under way and nothing runs
LEASE_POLL_S: Final = 0.02  # and while leases are out
STALL_S: Final = 3.0  # after which nothing can be running any more because leases hold what it needs
STALL_AGAIN_S: Final = 0.2


@dataclass(slots=True)
class DisaggControl:
    """Both sides as one part of the scheduler.

    Owns: its sides, when reports are asked for next, and since when requests wait while nothing runs.
    """

    clock: Callable[[], float]
    producer: Producer | None = None
    consumer: Consumer | None = None
    name: str = field(default="disaggregation", init=False)
    _next_poll: float = field(default=0.0, init=False)
    _stalled_at: float | None = field(default=None, init=False)

    def handshake(self, offered: Mapping[str, Any]) -> None:
        for side in (self.producer, self.consumer):
            if side is not None:
                side.handshake(offered)

    def on_arrival(self, req: "Request") -> RequestState:
        if self.producer is not None:
            self.producer.arrive(req)
        if self.consumer is not None:
            self.consumer.arrive(req)
        return RequestState.WAITING

    def match(self, req: "Request", local_tokens: int) -> "Match | Retry":
        return Match() if self.consumer is None else self.consumer.match(req, local_tokens)

    def after_reserve(self, req: "Request", block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        if self.consumer is not None:
            self.consumer.reserved(req, external_tokens)

    def plan(self, builder: "PlanBuilder") -> PlanPart | Late | None:
        self._break_circle(builder)
        grants, revokes = ((), ()) if self.producer is None else self.producer.take()
        saves = () if self.producer is None else self.producer.saves(builder)
        forgets = () if self.producer is None else self.producer.forgets()
        watches, drops, pulls = ((), (), ()) if self.consumer is None else self.consumer.take()
        if self.consumer is not None:
            self.consumer.step(builder)
        if not (grants or saves or forgets or revokes or watches or drops or pulls) and (
            builder.rows or not self._wants_reports or self.clock() < self._next_poll
        ):
            return None  # reports come with the rows, or are not due
        self._next_poll = self.clock() + self._poll_s
        return DisaggPlan(
            grants=grants, saves=saves, forgets=forgets, revokes=revokes, watches=watches, drops=drops, pulls=pulls
        )

    def _break_circle(self, builder: "PlanBuilder") -> None:
        """Who waits for room keeps alive the leases that it will read. When leases hold that room, here or at an engine
        whose requests wait for ours, nobody would ever go on: after a while ours end, one after the other."""
        if builder.rows or not self.producer or not self.consumer or self._fetching:
            self._stalled_at = None
            return
        now = self.clock()
        if self._stalled_at is None:
            self._stalled_at = now
        elif now - self._stalled_at > STALL_S:
            self._stalled_at = now - STALL_S + STALL_AGAIN_S
            self.producer.give_up_oldest()

    @property
    def _fetching(self) -> bool:
        return self.consumer is not None and (self.consumer.under_way or self.consumer.awaits_prompts)

    @property
    def _has_news(self) -> bool:
        return any(side is not None and side.has_news for side in (self.producer, self.consumer))

    @property
    def _wants_reports(self) -> bool:
        return self._fetching or bool(self.producer) or bool(self.consumer)

    @property
    def _poll_s(self) -> float:
        return FETCH_POLL_S if self._fetching else LEASE_POLL_S

    def supply(self, plan: StepPlan) -> PlanPart | None:
        return None

    def on_commit(self, req: "Request", first_block: int, block_hashes: Sequence[bytes]) -> None:
        return None

    def on_preempt(self, req: "Request") -> None:
        if self.producer is not None:
            self.producer.preempted(req)

    def on_finish(self, req: "Request") -> FinishHold:
        held = FinishHold() if self.consumer is None else self.consumer.finish(req)
        if held.holds_blocks or self.producer is None:
            if self.producer is not None:
                self.producer.left(req)
            return held
        return self.producer.offer(req)

    def absorb(self, result: StepResult) -> Absorbed:
        report = result.part(DisaggReport)
        if report is None:
            return Absorbed()
        ready: list[Readiness] = []
        release: list[str] = []
        for event in report.events:
            if event.news is LeaseNews.LOST:
                if self.consumer is not None:
                    ready += self.consumer.lost(event.lease)
            elif event.news is LeaseNews.THERE:
                if self.consumer is not None:
                    self.consumer.appeared(event.lease)
            elif self.producer is not None and (request_id := self.producer.hear(event)) is not None:
                release.append(request_id)
        for job in report.jobs if self.consumer is not None else ():
            woken, freed = self.consumer.report(job)  # type: ignore[union-attr]
            ready += [] if woken is None else [woken]
            release += [] if freed is None else [freed]
        return Absorbed(ready=tuple(ready), release=tuple(release))

    def next_deadline(self) -> float | None:
        if self._has_news:
            return self.clock()
        return self._next_poll if self._wants_reports else None

    def settled(self) -> bool:
        return not self._wants_reports and not self._has_news

    def reset(self) -> bool:
        return True  # what is under way belongs to live requests and leases, and is in no index

    def close(self) -> None:
        return None  # leases end by silence

    def take_events(self) -> tuple[CacheEvent, ...]:
        return ()  # what is under a lease is in the cache, or is nobody's to find

    def stats(self) -> dict[str, Any]:
        sides = (self.producer, self.consumer)
        return {name: value for side in sides if side is not None for name, value in side.stats().items()}


def make(
    options: TransferOptions, context: ControlContext, new_id: Callable[[], str] = lambda: secrets.token_hex(16)
) -> DisaggControl:
    """The part for a role. Raises `ConfigError` for a producer that nobody could reach."""
    sides, transport, producer, consumer = TransferRole(str(options.kv_role)), options.kv_transport, None, None
    sizes = [group.spec.block_size for group in context.layout.groups]
    if sides.produces:
        address = producer_address(sides, transport, options.kv_listen, options.kv_advertise)
        producer = Producer(
            address=address,
            lease_s=options.kv_lease_s,
            blocks_of=context.blocks_of,
            clock=context.clock,
            new_id=new_id,
            block_sizes=sizes if options.kv_by_layer else (),
        )
    if sides.consumes:
        on_failure = OnFailure(options.kv_load_failure)
        consumer = Consumer(
            sizes,
            on_failure,
            blocks_of=context.blocks_of,
            transport=transport,
            allow=options.kv_allow or (),
            by_layer=options.kv_by_layer,
        )
    return DisaggControl(context.clock, producer, consumer)


def producer_address(role: str, transport: str, listen: str | None, advertise: str | None) -> str:
    """Where consumers find what this engine keeps. Raises `ConfigError`."""
    if "://" in transport:
        return transport
    if listen is None:
        raise ConfigError(f"--kv-role {role}: consumers must reach this engine; give --kv-listen host:port")
    host, port = parse_listen(listen)
    if advertise is None and host in ("0.0.0.0", "::"):
        raise ConfigError(f"--kv-listen {listen} takes any address; say with --kv-advertise which one consumers use")
    if not port:
        raise ConfigError(f"--kv-listen {listen}: a producer's port must be known beforehand; give one above 0")
    if advertise is None:
        return f"{transport}://{host}:{port}"
    if advertise.rpartition(":")[2].isdigit():
        parse_listen(advertise, "--kv-advertise")
        return f"{transport}://{advertise}"
    return f"{transport}://{advertise}:{port}"
