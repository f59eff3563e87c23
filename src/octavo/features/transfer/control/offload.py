"""Evicted and finished prefixes go down the tiers and come back instead of being computed again (TIR, SCH-13).

Promises: a store is planned before the step whose rows could overwrite its blocks, so nothing has to be held for it;
blocks that a load writes to belong to nobody else until the load has ended, also when its request has; a load that
failed is computed again from the last good chunk.
Does not know: bytes, or how tiers work (see `tiers`, and `features.transfer.data` for the other half).

KV is loaded by *units*: the fewest tokens that are whole blocks in every group.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import TYPE_CHECKING, Any, Final

from octavo.base.kvspec import KVLayout
from octavo.base.step import PlanPart, StepPlan, StepResult
from octavo.base.types import RequestState
from octavo.features.transfer.address import REQUEST, chunk_bytes, num_rows, parse_tiers, row_bytes
from octavo.features.transfer.control.evict import make_policy
from octavo.features.transfer.control.figures import labelled
from octavo.features.transfer.control.primary import Chunk, PrimaryTier
from octavo.features.transfer.control.speed import Speed
from octavo.features.transfer.control.tier_books import TierFacts
from octavo.features.transfer.control.tiers import Found, TierStack
from octavo.features.transfer.plan import Copy, Speeds, TransferPlan, TransferReport
from octavo.features.transfer.wishes import tier_wishes
from octavo.kvcache.hashing import BlockHash, group_key
from octavo.kvcache.policies import NULL_BLOCK
from octavo.scheduler.seams import Absorbed, FinishHold, Late, Match, Readiness, Retry

if TYPE_CHECKING:
    from octavo.scheduler.draft import StepDraft
    from octavo.scheduler.request import Request

ASK_S: Final = 0.1  # after which a lookup is made again though no tier has answered
POLL_S: Final = 0.002  # how often jobs are asked after while nothing runs
NOTHING: Final = Absorbed()
COPY_AGAIN: Final = 64  # every so many such lookups the host is asked all the same: it may be faster by now
LEAST_TOKENS: Final = 64  # of prompts in a step that says how fast they are computed
LEAST_BYTES: Final = 1 << 20  # of a load that says how fast copies are
NOT_MEASURED: Final = Speeds()


@dataclass(slots=True)
class _Row:
    """One request here. Owns: its block table, and what it was offered and is being loaded."""

    blocks: list[list[int]]
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

    Owns: the stack of tiers, each request's block table, copies that were planned, and what waits to be.
    """

    name = "transfer"

    def __init__(
        self,
        stack: TierStack,
        *,
        block_sizes: Sequence[int],
        hash_block_size: int,
        clock: Callable[[], float],
        bytes_per_token: float = 0.0,
        speeds: Speeds = NOT_MEASURED,
    ) -> None:
        """`bytes_per_token` of all groups together; 0: what a copy costs is not looked at."""
        self.stack = stack
        self._sizes = tuple(block_sizes)
        self._unit = lcm(*self._sizes)
        self._strides = tuple(size // hash_block_size for size in self._sizes)
        self._hash_block_size = hash_block_size
        self._clock = clock
        self._rows: dict[str, _Row] = {}
        self._jobs: dict[int, _Load | _Store] = {}
        self._stores: list[Copy] = []
        self._loads: list[Copy] = []
        self._next_job = -1  # copies count down, the jobs of tiers up
        self._next_poll = 0.0
        self._computing = Speed(LEAST_TOKENS)  # prompt tokens a second
        self._computing.begin(speeds.prompt_tokens_per_s)
        self._loading = Speed(LEAST_BYTES)  # bytes a second
        self._loading.begin(speeds.load_bytes_per_s)
        self._unit_bytes = bytes_per_token * self._unit
        self._num_not_worth = 0  # lookups that were not made since computing is faster than any copy
        self._prompt_tokens: dict[int, int] = {}  # by step in flight

    # ---- a request's life ---------------------------------------------------------------------

    def on_arrival(self, req: "Request") -> RequestState:
        hint = req.source.transfer
        only, wants_all = tier_wishes({} if hint is None else hint.data, self.stack.names)
        self._rows[req.request_id] = _Row([[] for _ in self._sizes])
        self.stack.open(req.request_id, wants_all=wants_all, only=only)
        return RequestState.WAITING

    def match(self, req: "Request", local_tokens: int) -> "Match | Retry":
        row = self._rows[req.request_id]
        row.offered = None
        row.found_here = local_tokens
        now = self._clock()
        if row.asked is not None:  # a long prompt has thousands of chunks, and this is asked in every step
            version, tokens, when = row.asked
            if version == self.stack.version and tokens == local_tokens and now - when < ASK_S:
                return Retry()
            row.asked = None
        first, last = local_tokens // self._unit, (req.num_tokens - 1) // self._unit
        if self._copying_is_slow():
            return Match()
        hashes = req.block_hashes
        last = min(last, len(hashes) * self._hash_block_size // self._unit)
        if last <= first:
            return Match()
        keys = [key for unit in range(first, last) for key in self._keys(hashes, unit)]
        chunks = len(keys) // (last - first)
        found = self.stack.lookup(req.request_id, keys, self._computing.seconds(self._unit) / chunks)
        if found.state in (Found.RETRY, Found.PENDING):
            row.asked = (self.stack.version, local_tokens, now)
            return Retry()
        units = found.num_ready // chunks
        if not units:
            return Match()
        row.offered = (local_tokens, first, first + units)
        source = self.stack.source(req.request_id, keys[: found.num_ready])
        return Match(tokens=(first + units) * self._unit, wait=True, source=source)

    def _copying_is_slow(self) -> bool:
        """Computing is faster than copying from the host, and so than any tier; tried all the same now and then."""
        compute_s = self._computing.seconds(self._unit)
        if not compute_s or self._loading.seconds(self._unit_bytes) <= compute_s:
            return False
        self._num_not_worth += 1
        return self._num_not_worth % COPY_AGAIN != 0

    def _keys(self, hashes: Sequence[BlockHash], unit: int) -> list[bytes]:
        """The keys of a unit's chunks: group by group, block by block."""
        return [
            group_key(hashes[(index + 1) * stride - 1], group)
            for group, stride in enumerate(self._strides)
            for index in self._indices(group, unit)
        ]

    def _indices(self, group: int, unit: int) -> range:
        blocks = self._unit // self._sizes[group]
        return range(unit * blocks, (unit + 1) * blocks)

    def after_reserve(self, req: "Request", block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        row = self._rows[req.request_id]
        for table, blocks in zip(row.blocks, block_ids, strict=True):
            table.extend(blocks)
        if external_tokens and row.offered is not None:
            self._load(req, row, *row.offered)  # before any store: one may take the row of what was offered
        row.offered = None
        # What was found here was computed for others: only who wants all of a request gets it too. What is loaded
        # comes to `on_commit`.
        if row.found_here and self.stack.wants_all(req.request_id):
            self._store(req, row, 0, row.found_here // self._hash_block_size)
        row.found_here = 0

    def _load(self, req: "Request", row: _Row, local: int, first: int, end: int) -> None:
        """One copy for each group, of all units but blocks found here and those that a window has passed."""
        row.good_units = end
        for group, stride in enumerate(self._strides):
            wanted = [
                (unit, group_key(req.block_hashes[(index + 1) * stride - 1], group), row.blocks[group][index])
                for unit in range(first, end)
                for index in self._indices(group, unit)
                if row.blocks[group][index] != NULL_BLOCK and (index + 1) * self._sizes[group] > local
            ]
            if not wanted:
                continue
            chunks = self.stack.begin_load([key for _, key, _ in wanted])
            job = self._job(_Load(req.request_id, chunks, tuple(unit for unit, _, _ in wanted)))
            row.loading.add(job)
            self._loads.append(
                Copy(
                    job=job,
                    group=group,
                    keys=tuple(key for _, key, _ in wanted),
                    blocks=tuple(block for _, _, block in wanted),
                    rows=tuple(chunk.row for chunk in chunks),
                )
            )

    def _job(self, what: "_Load | _Store") -> int:
        job = self._next_job
        self._next_job -= 1
        self._jobs[job] = what
        return job

    def on_commit(self, req: "Request", first_block: int, block_hashes: Sequence[bytes]) -> None:
        row = self._rows.get(req.request_id)
        if row is not None:
            self._store(req, row, first_block, first_block + len(block_hashes))

    def _store(self, req: "Request", row: _Row, first: int, end: int) -> None:
        """Chunks whose last hashed block is one of these, for each group one copy of those that the host lacks."""
        hashes = req.block_hashes
        for group, stride in enumerate(self._strides):
            indices = range(first // stride, end // stride)
            table = row.blocks[group]
            where = {
                group_key(hashes[(i + 1) * stride - 1], group): table[i]
                for i in indices
                if i < len(table) and table[i] != NULL_BLOCK
            }
            chunks = self.stack.begin_store(req.request_id, tuple(where))
            if chunks:
                job = self._job(_Store(req.request_id, chunks))
                self._stores.append(
                    Copy(
                        job=job,
                        group=group,
                        keys=tuple(chunk.key for chunk in chunks),
                        blocks=tuple(where[chunk.key] for chunk in chunks),
                        rows=tuple(chunk.row for chunk in chunks),
                    )
                )

    def on_preempt(self, req: "Request") -> None:
        row = self._rows[req.request_id]
        row.blocks = [[] for _ in self._sizes]
        row.offered = None
        row.found_here = 0

    def on_finish(self, req: "Request") -> FinishHold:
        row = self._rows.get(req.request_id)
        if row is None:
            return FinishHold()
        self.stack.close(req.request_id)
        if row.loading:
            row.ended = True  # its blocks are still written to
            return FinishHold(holds_blocks=True)
        del self._rows[req.request_id]
        return FinishHold()

    # ---- steps --------------------------------------------------------------------------------

    def plan(self, draft: "StepDraft") -> PlanPart | Late | None:
        tokens = sum(take.count for take in draft.takes.values() if take.in_prompt)
        if tokens:
            self._prompt_tokens[draft.seq] = tokens
        tier_jobs = self.stack.take_jobs()
        stores, loads = tuple(self._stores), tuple(self._loads)
        if stores or loads or tier_jobs:
            self._stores.clear()
            self._loads.clear()
        elif draft.rows or not self._under_way or self._clock() < self._next_poll:
            return None  # reports come with the rows, or are not due
        self._next_poll = self._clock() + POLL_S
        return TransferPlan(stores=stores, loads=loads, tier_jobs=tier_jobs)

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
        return self._next_poll if self._under_way else None

    def settled(self) -> bool:
        return not self._under_way and not self._stores

    def reset(self) -> bool:
        return self.stack.reset()

    def stats(self) -> dict[str, Any]:
        return labelled({**self.stack.stats(), "host.not_worth": self._num_not_worth})


def make(
    tiers: tuple[str, ...],
    layout: KVLayout,
    *,
    hash_block_size: int,
    clock: Callable[[], float],
    speeds: Mapping[str, float],
) -> Offload:
    """The part for these addresses. `speeds`: what was measured at the start, see `plan.Speeds`.

    Raises `ConfigError` for an address that cannot be.
    """
    host, *others = parse_tiers(tiers)
    rows = num_rows(layout, host)
    stack = TierStack(
        PrimaryTier(rows, make_policy(host.policy, rows)),
        [
            TierFacts(name=tier.name, medium=tier.kind, is_written=tier.is_written, wants_all=tier.policy == REQUEST)
            for tier in others
        ],
        clock=clock,
        chunk_bytes=row_bytes(layout),
    )
    sizes = [group.spec.block_size for group in layout.groups]
    return Offload(
        stack,
        block_sizes=sizes,
        hash_block_size=hash_block_size,
        clock=clock,
        bytes_per_token=sum(chunk_bytes(layout, group) / size for group, size in enumerate(sizes)),
        speeds=Speeds(**speeds),
    )
