"""Evicted and finished prefixes go down the tiers and come back instead of being computed again (TIR, SCH-13).

Promises: a store is planned before the step whose rows could overwrite its blocks, so nothing has to be held for it;
blocks that a load writes to belong to nobody else until the load has ended, also when its request has; a load that
failed is computed again from the last good chunk.
Does not know: a request's blocks (it asks for them), bytes, or how tiers work (see `tiers`, and
`features.transfer.data` for the other half).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from octavo.base.kvspec import KVLayout
from octavo.base.step import PlanPart, StepPlan, StepResult
from octavo.base.types import RequestState
from octavo.features.transfer.address import REQUEST, chunk_bytes, num_rows, parse_tiers, row_bytes
from octavo.features.transfer.control.chunks import ChunkKeys
from octavo.features.transfer.control.evict import make_policy
from octavo.features.transfer.control.host_index import Chunk, HostBlockIndex
from octavo.features.transfer.control.metrics import labelled
from octavo.features.transfer.control.polls import Polls
from octavo.features.transfer.control.search import ChunkState
from octavo.features.transfer.control.speed import Speed
from octavo.features.transfer.control.tier_state import TierFacts
from octavo.features.transfer.control.tiers import HOST, TierStack
from octavo.features.transfer.disagg import TransferHint
from octavo.features.transfer.plan import Copy, Speeds, TransferPlan, TransferReport
from octavo.features.transfer.wishes import tier_wishes
from octavo.kvcache.prefix import CacheEvent, EventLog, NoEvents
from octavo.plugins.features import BlocksOf
from octavo.scheduler.seams import Absorbed, FinishHold, Late, Match, Readiness, Retry

if TYPE_CHECKING:
    from octavo.scheduler.plan_builder import PlanBuilder
    from octavo.scheduler.request import Request

log = logging.getLogger(__name__)

ASK_S: Final = 0.1  # after which a lookup is made again though no tier has answered
NOTHING: Final = Absorbed()
COPY_AGAIN: Final = 64  # every so many such lookups the host is asked all the same: it may be faster by now
LEAST_TOKENS: Final = 64  # of prompts in a step that says how fast they are computed
LEAST_BYTES: Final = 1 << 20  # of a load that says how fast copies are
NOT_MEASURED: Final = Speeds()


@dataclass(slots=True)
class _Row:
    """One request here. Owns: what it was offered and is being loaded."""

    keys: list[bytes] = field(default_factory=list)  # of its first units
    found_here: int = 0  # tokens, at the last lookup; what is computed from then on is not among them
    offered: tuple[int, int, int] | None = None  # tokens found here, and units that `match` found beyond
    asked: tuple[int, int, float] | None = None  # at which version of the tiers, how many tokens were here, and when
    loading: set[int] = field(default_factory=set)  # jobs
    good_units: int = 0  # of a load that is under way: leading units that are there
    ended: bool = False


@dataclass(frozen=True, slots=True)
class _Load:
    request_id: str
    chunks: tuple[Chunk, ...]
    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Store:
    request_id: str
    chunks: tuple[Chunk, ...]


class Offload:
    """The control half: a part of the scheduler.

    Owns: the stack of tiers, who waits for tiers, copies that were planned, and what waits to be.
    """

    name = "transfer"

    def __init__(
        self,
        stack: TierStack,
        *,
        chunks: ChunkKeys,
        blocks_of: BlocksOf,
        clock: Callable[[], float],
        bytes_per_token: float = 0.0,
        speeds: Speeds = NOT_MEASURED,
        events: EventLog | NoEvents | None = None,
    ) -> None:
        """`bytes_per_token` of all groups together; 0: what a copy costs is not looked at. `events`: those of the
        stack's primary, where they are told to somebody."""
        self.stack = stack
        self._events = NoEvents() if events is None else events
        self._chunks = chunks
        self._unit = chunks.unit
        self._blocks_of = blocks_of
        self._clock = clock
        self._rows: dict[str, _Row] = {}
        self._waiting: set[str] = set()  # requests that wait for tiers
        self._jobs: dict[int, _Load | _Store] = {}
        self._stores: list[Copy] = []
        self._loads: list[Copy] = []
        self._next_job = -1  # copies count down, the jobs of tiers up
        self._polls = Polls()
        self._computing = Speed(LEAST_TOKENS)  # prompt tokens a second
        self._computing.begin(speeds.prompt_tokens_per_s)
        self._loading = Speed(LEAST_BYTES)  # bytes a second
        self._loading.begin(speeds.load_bytes_per_s)
        self._unit_bytes = bytes_per_token * self._unit
        self._num_not_worth = 0  # lookups that were not made since computing is faster than any copy
        self._prompt_tokens: dict[int, int] = {}  # by step in flight

    def handshake(self, offered: Mapping[str, Any]) -> None:
        return None  # what is sealed says it all

    # ---- a request's life ---------------------------------------------------------------------

    def on_arrival(self, req: "Request") -> RequestState:
        hint = req.source.part(TransferHint)
        only, wants_all = tier_wishes({} if hint is None else hint.data, self.stack.names)
        self._rows[req.request_id] = _Row()
        self.stack.open(req.request_id, wants_all=wants_all, only=only)
        return RequestState.WAITING

    def match(self, req: "Request", local_tokens: int) -> "Match | Retry":
        found = self._match(req, self._rows[req.request_id], local_tokens)
        if isinstance(found, Retry):
            self._waiting.add(req.request_id)
        else:
            self._waiting.discard(req.request_id)
        return found

    def _match(self, req: "Request", row: _Row, local_tokens: int) -> "Match | Retry":
        row.offered = None
        row.found_here = local_tokens
        now = self._clock()
        if row.asked is not None:  # a long prompt has thousands of chunks, and this is asked in every step
            version, tokens, when = row.asked
            if version == self.stack.version and tokens == local_tokens and now - when < ASK_S:
                return Retry()
            row.asked = None
        if self._copying_is_slow():
            return Match()
        first = local_tokens // self._unit
        last = self._chunks.num_units(req.block_hashes, req.num_tokens - 1)
        if last <= first:
            return Match()
        keys, per_unit = self._keys(req, row, first, last), self._chunks.per_unit
        found = self.stack.lookup(req.request_id, keys, self._computing.seconds(self._unit) / per_unit)
        if found.state in (ChunkState.RETRY, ChunkState.PENDING):
            row.asked = (self.stack.version, local_tokens, now)
            return Retry()
        units = found.num_ready // per_unit
        if not units:
            return Match()
        row.offered = (local_tokens, first, first + units)
        shares = self._shares(req.request_id, keys[: units * per_unit], first)
        return Match(tokens=(first + units) * self._unit, wait=True, source=shares[-1][1], shares=shares)

    def _keys(self, req: "Request", row: _Row, first: int, last: int) -> list[bytes]:
        """The keys of these units; those that were made are kept."""
        per_unit = self._chunks.per_unit
        if len(row.keys) < last * per_unit:
            row.keys += self._chunks.keys(req.block_hashes, len(row.keys) // per_unit, last)
        return row.keys[first * per_unit : last * per_unit]

    def _shares(self, request_id: str, keys: Sequence[bytes], first: int) -> tuple[tuple[int, str], ...]:
        """Up to which token each source brings what was found (TIR-18). A unit of several is the tier's that gave one of
        its chunks."""
        sources, per_unit = self.stack.sources(request_id, keys), self._chunks.per_unit
        if per_unit > 1:
            units = [sources[at : at + per_unit] for at in range(0, len(keys), per_unit)]
            sources = tuple([next((name for name in unit if name != HOST), HOST) for unit in units])
        if len(set(sources)) == 1:
            return (((first + len(sources)) * self._unit, sources[0]),)
        shares, end = [], first
        for name, run in groupby(sources):
            end += len(tuple(run))
            shares.append((end * self._unit, name))
        return tuple(shares)

    def _copying_is_slow(self) -> bool:
        """Computing is faster than copying from the host, and so than any tier; tried all the same now and then."""
        compute_s = self._computing.seconds(self._unit)
        if not compute_s or self._loading.seconds(self._unit_bytes) <= compute_s:
            return False
        self._num_not_worth += 1
        return self._num_not_worth % COPY_AGAIN != 0

    def after_reserve(self, req: "Request", block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        row = self._rows[req.request_id]
        if external_tokens and row.offered is not None:
            self._load(req, row, *row.offered)  # before any store: one may take the row of what was offered
        row.offered = None
        # What was found here was computed for others: only who wants all of a request gets it too. What is loaded
        # comes to `on_commit`.
        if row.found_here and self.stack.wants_all(req.request_id):
            self._store(req, 0, self._chunks.num_hashes(row.found_here))
        row.found_here = 0

    def _load(self, req: "Request", row: _Row, local: int, first: int, end: int) -> None:
        """One copy for each group, of all units but blocks found here and those that a window has passed."""
        row.good_units = end
        hashes = req.block_hashes
        for group, table in enumerate(self._blocks_of(req.request_id)):
            indices, units, blocks = self._chunks.to_load(group, table, local, first, end)
            if not indices:
                continue
            keys = self._chunks.group_keys(hashes, group, indices)
            chunks = self.stack.begin_load(keys)
            job = self._job(_Load(req.request_id, chunks, tuple(units)))
            row.loading.add(job)
            rows = tuple([chunk.row for chunk in chunks])
            self._loads.append(Copy(job=job, group=group, keys=tuple(keys), blocks=tuple(blocks), rows=rows))

    def _job(self, what: "_Load | _Store") -> int:
        job = self._next_job
        self._next_job -= 1
        self._jobs[job] = what
        return job

    def on_commit(self, req: "Request", first_block: int, block_hashes: Sequence[bytes]) -> None:
        if req.request_id in self._rows:
            self._store(req, first_block, first_block + len(block_hashes))

    def _store(self, req: "Request", first: int, end: int) -> None:
        """Chunks whose last hashed block is one of these, for each group one copy of those that the host lacks."""
        for group, table in enumerate(self._blocks_of(req.request_id)):
            where = self._chunks.to_store(req.block_hashes, group, table, first, end)
            chunks = self.stack.begin_store(req.request_id, tuple(where))
            if chunks:
                keys = tuple([chunk.key for chunk in chunks])
                blocks = tuple([block for key in keys for block in where[key]])
                rows = tuple([chunk.row for chunk in chunks])
                job = self._job(_Store(req.request_id, chunks))
                self._stores.append(Copy(job=job, group=group, keys=keys, blocks=blocks, rows=rows))

    def on_preempt(self, req: "Request") -> None:
        row = self._rows[req.request_id]
        row.offered = None
        row.found_here = 0

    def on_finish(self, req: "Request") -> FinishHold:
        row = self._rows.get(req.request_id)
        self._waiting.discard(req.request_id)
        if row is None:
            return FinishHold()
        self.stack.close(req.request_id)
        if row.loading:
            row.ended = True  # its blocks are still written to
            return FinishHold(holds_blocks=True)
        del self._rows[req.request_id]
        return FinishHold()

    # ---- steps --------------------------------------------------------------------------------

    def plan(self, builder: "PlanBuilder") -> PlanPart | Late | None:
        tokens = sum(take.count for take in builder.takes.values() if take.in_prompt)
        if tokens:
            self._prompt_tokens[builder.seq] = tokens
        version, now = self.stack.version, self._clock()
        tier_jobs = self.stack.take_jobs()
        stores, loads = tuple(self._stores), tuple(self._loads)
        if stores or loads or tier_jobs:
            self._stores.clear()
            self._loads.clear()
            self._polls.news(now)
            return TransferPlan(stores=stores, loads=loads, tier_jobs=tier_jobs)
        if builder.rows:
            return None  # reports come with the rows
        if version != self.stack.version:
            self._polls.now(now)  # who waits for tiers is to look again, though nobody has anything to run
            return None
        if now < self._polls.next:
            return None
        self._polls.looked(now)
        return TransferPlan() if self._under_way else None

    @property
    def _under_way(self) -> bool:
        return bool(self._jobs) or self.stack.has_pending_work

    def supply(self, plan: StepPlan) -> PlanPart | None:
        return None

    def absorb(self, result: StepResult) -> Absorbed:
        tokens = self._prompt_tokens.pop(result.seq, 0)
        self._computing.seen(tokens, result.timings.forward_s)
        report = result.part(TransferReport)
        if report is None:
            return NOTHING
        self._polls.news(self._clock())
        ready: list[Readiness] = []
        release: list[str] = []
        for job in report.jobs:
            if job.job > 0:
                self.stack.absorb(job)
                continue
            copy = self._jobs.pop(job.job, None)
            if isinstance(copy, _Store):
                good = job.good if len(job.good) == len(copy.chunks) else (False,) * len(copy.chunks)
                for chunk, fine in zip(copy.chunks, good, strict=True):
                    self.stack.end_store(copy.request_id, chunk, fine)
            elif copy is not None:
                self._loading.seen(job.num_bytes, job.seconds)
                self._loaded(job.job, copy, job.good, ready, release)
        return Absorbed(ready=tuple(ready), release=tuple(release))

    def _loaded(self, job: int, load: _Load, good: Sequence[bool], ready: list[Readiness], release: list[str]) -> None:
        self.stack.end_load(load.chunks)
        row = self._rows[load.request_id]
        row.loading.remove(job)
        if len(good) != len(load.units):
            good = (False,) * len(load.units)
        for unit, fine in zip(load.units, good, strict=True):
            if not fine:
                row.good_units = min(row.good_units, unit)
        if row.loading:
            return
        if row.ended:
            del self._rows[load.request_id]
            release.append(load.request_id)
        else:
            ready.append(Readiness(load.request_id, num_tokens=row.good_units * self._unit))

    def next_deadline(self) -> float | None:
        return self._polls.next if self._under_way or self._waiting else None

    def settled(self) -> bool:
        return not self._under_way and not self._stores

    def reset(self) -> bool:
        return self.stack.reset()

    def take_events(self) -> tuple[CacheEvent, ...]:
        """Blocks that came to host memory and went."""
        return self._events.take()

    def close(self) -> None:
        for name, count in self.stack.shutdown().items():
            log.warning("%d blocks of KV were not yet in the tier %s and may be lost to it", count, name)

    def stats(self) -> dict[str, Any]:
        return labelled({**self.stack.stats(), "host.not_worth": self._num_not_worth})


def make(
    tiers: tuple[str, ...],
    layout: KVLayout,
    *,
    hash_block_size: int,
    blocks_of: BlocksOf,
    clock: Callable[[], float],
    speeds: Mapping[str, float],
    record_events: bool = False,
) -> Offload:
    """The part for these addresses. `speeds`: what was measured at the start, see `plan.Speeds`.

    Raises `ConfigError` for an address that cannot be.
    """
    host, *others = parse_tiers(tiers)
    measured = Speeds.of(speeds)
    rows = num_rows(layout, host)
    # A chunk of several blocks is known by its last one; who follows blocks one by one could make nothing of that.
    events = EventLog() if record_events and host.blocks == 1 else NoEvents()
    stack = TierStack(
        HostBlockIndex(rows, make_policy(host.policy, rows), events),
        [
            TierFacts(
                name=tier.name,
                medium=tier.kind,
                locality=tier.locality,
                is_written=tier.is_written,
                wants_all=tier.policy == REQUEST,
                high_mark=1 / tier.thin_below,
                low_mark=1 / tier.full_above,
                limit_s=tier.timeout_s,
                read_bytes_per_s=measured.read_bytes_per_s.get(tier.name, 0.0),
            )
            for tier in others
        ],
        clock=clock,
        chunk_bytes=row_bytes(layout, host.blocks),
    )
    sizes = [group.spec.block_size for group in layout.groups]
    return Offload(
        stack,
        chunks=ChunkKeys(sizes, hash_block_size, host.blocks),
        blocks_of=blocks_of,
        clock=clock,
        bytes_per_token=sum(chunk_bytes(layout, group) / size for group, size in enumerate(sizes)),
        speeds=measured,
        events=events,
    )
