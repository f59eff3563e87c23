"""The consumer's side of a hand-over: prompts that others computed are fetched (PDX-2, PDX-4, PDX-5).

Promises: a request whose fetch failed is computed again from the last good block, or ends with an error where that was
asked for, and never waits for ever; blocks that a fetch writes to belong to nobody else until it has ended, also when
its request has.
Does not know: a request's blocks (it asks for them), sockets or bytes, or what the producer does with a lease.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from octavo.base.errors import ClientError, ConfigError
from octavo.features.transfer.address import parse_listen
from octavo.features.transfer.disagg import (
    Hint,
    LeaseDrop,
    LeaseWatch,
    PullJob,
    TransferHint,
    difference,
    good_tokens,
    read_hint,
)
from octavo.features.transfer.options import FIELD
from octavo.features.transfer.plan import JobReport
from octavo.kvcache.policies import NULL_BLOCK
from octavo.plugins.features import BlocksOf
from octavo.scheduler.seams import FinishHold, Match, Readiness, Retry

if TYPE_CHECKING:
    from octavo.scheduler.plan_builder import PlanBuilder
    from octavo.scheduler.request import Request

log = logging.getLogger(__name__)

SOURCE: Final = "remote"
COUNTS: Final = ("fetched", "partly_fetched", "failed", "in_step", "lost", "not_ours", "not_allowed", "other_form")


class OnFailure(StrEnum):
    """What becomes of a request whose KV could not be fetched."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


class Stage(StrEnum):
    """Where a consumer's request stands with its hint."""

    OFFERED = "offered"  # its lease is kept alive
    LOADING = "loading"
    OVER = "over"  # loaded, lost, not needed or given up: computed from here on


@dataclass(slots=True)
class _Wanted:
    """One request with a hint. Owns: how far its fetch has come."""

    hint: Hint
    stage: Stage = Stage.OFFERED
    pull: PullJob | None = None
    local: int = 0  # tokens that were here
    promised: int = 0  # and with what is fetched
    ended: bool = False
    there: bool = False  # all of it can be read now
    in_step: bool = False  # it is read by the step that computes with it


class Consumer:
    """Fetches prompts that others computed.

    Owns: every live request's hint, fetches under way, and what is to be told to the data half.
    """

    def __init__(
        self,
        block_sizes: Sequence[int],
        on_failure: OnFailure,
        *,
        blocks_of: BlocksOf,
        transport: str = "tcp",
        allow: Sequence[str] = (),
        by_layer: bool = False,
    ) -> None:
        """`allow`: hosts that hints may name; empty: any. `by_layer`: a step may read what it computes with."""
        self._sizes = tuple(block_sizes)
        self._on_failure = on_failure
        self._blocks_of = blocks_of
        self._transport = transport
        self._by_layer = by_layer
        self._form: dict[str, str] = {}
        self._running: set[str] = set()  # steps are not held up for a fetch while somebody else runs
        self._allow = frozenset(host.strip("[]") for host in allow)
        self._wanted: dict[str, _Wanted] = {}
        self._jobs: dict[int, str] = {}
        self._next_job = 1
        self._watches: list[LeaseWatch] = []
        self._drops: list[LeaseDrop] = []
        self._pulls: list[PullJob] = []
        self.counts = dict.fromkeys(COUNTS, 0)
        self.num_tokens = 0

    @property
    def under_way(self) -> bool:
        """A fetch has not been reported yet."""
        return bool(self._jobs)

    @property
    def has_news(self) -> bool:
        """The data half is to be told something."""
        return bool(self._watches or self._drops or self._pulls)

    def __len__(self) -> int:
        """Leases of others that are kept alive."""
        return sum(wanted.stage is not Stage.OVER for wanted in self._wanted.values())

    def handshake(self, form: Mapping[str, str]) -> None:
        """What a producer must offer for its prompts to be read here."""
        self._form = dict(form)

    def arrive(self, req: "Request") -> None:
        """Note the request's hint, if it has one. Raises `ClientError` for one that makes no sense."""
        wish = req.source.part(TransferHint)
        hint = None if wish is None else read_hint(wish.data)
        if hint is None:
            return
        if not self._may_reach(hint.address):
            self.counts["not_allowed"] += 1
            log.warning("a hint names %s, which is not for this engine; its prompt is computed here", hint.address)
            return
        if self._form and hint.form and (differs := difference(self._form, hint.form)):
            self.counts["other_form"] += 1
            if self._on_failure is OnFailure.FAIL:
                raise ClientError(_failed(hint, differs), param=FIELD)
            log.warning("the prompts of %s cannot be used here (%s); they are computed here", hint.address, differs)
            return
        wanted = _Wanted(hint)
        self._wanted[req.request_id] = wanted
        self._watches.append(LeaseWatch(lease=hint.lease, address=hint.address, lease_s=hint.lease_s))
        if not hint.is_for(req.source):
            self.counts["not_ours"] += 1
            self._give_up(wanted)

    def _may_reach(self, address: str) -> bool:
        """Whoever sends a request chooses the address in its hint: it must be of our transport, and one we may use."""
        kind, _, place = address.partition("://")
        if "://" in self._transport:
            return address == self._transport
        try:
            host, port = parse_listen(place)
        except ConfigError:
            return False
        return kind == self._transport and port > 0 and (not self._allow or host in self._allow)

    def match(self, req: "Request", local_tokens: int) -> Match | Retry:
        """What the producer has beyond what was found here."""
        wanted = self._wanted.get(req.request_id)
        if wanted is None or wanted.stage is not Stage.OFFERED:
            return Match()
        tokens = min(wanted.hint.num_tokens, req.num_tokens - 1)
        if tokens <= local_tokens:
            return Match()  # looked at again while it waits: what was found here may go before it is admitted
        wanted.local, wanted.in_step = local_tokens, self._by_layer and not self._running
        if wanted.in_step and not wanted.there:
            return Retry()  # a step waits for reading, and not for a producer
        return Match(tokens=tokens, wait=not wanted.in_step, source=SOURCE)

    def reserved(self, req: "Request", external_tokens: int) -> None:
        """Fetch, when the request was parked for it; it has no use for the lease once it runs without."""
        wanted = self._wanted.get(req.request_id)
        if wanted is None or wanted.stage is not Stage.OFFERED:
            return
        if not external_tokens:
            self._end(wanted, done=True)
            return
        local = wanted.local if wanted.in_step else req.num_computed_tokens  # which counts what this step computes
        tables = self._blocks_of(req.request_id)
        places = tuple(
            tuple(i for i, block in enumerate(table) if block != NULL_BLOCK and (i + 1) * size > local)
            for table, size in zip(tables, self._sizes, strict=True)
        )
        wanted.local, wanted.promised = local, external_tokens
        wanted.pull = PullJob(
            job=self._next_job,
            lease=wanted.hint.lease,
            places=places,
            blocks=tuple(tuple(table[i] for i in row) for table, row in zip(tables, places, strict=True)),
            in_step=wanted.in_step,
        )
        wanted.stage = Stage.LOADING
        self._jobs[self._next_job] = req.request_id
        self._next_job += 1
        self._pulls.append(wanted.pull)

    def step(self, builder: "PlanBuilder") -> None:
        """Who runs now."""
        if self._by_layer:
            self._running = {req.request_id for req in builder.rows}

    def finish(self, req: "Request") -> FinishHold:
        """The request ended; blocks that are being written to stay until that has ended too."""
        self._running.discard(req.request_id)
        wanted = self._wanted.get(req.request_id)
        if wanted is None:
            return FinishHold()
        if wanted.stage is Stage.LOADING:
            wanted.ended = True
            return FinishHold(holds_blocks=True)
        if wanted.stage is Stage.OFFERED:
            self._give_up(wanted)
        del self._wanted[req.request_id]
        return FinishHold()

    def _end(self, wanted: _Wanted, *, done: bool) -> None:
        wanted.stage = Stage.OVER
        self._drops.append(LeaseDrop(lease=wanted.hint.lease, done=done))

    def _give_up(self, wanted: _Wanted) -> None:
        self._end(wanted, done=False)

    def take(self) -> tuple[tuple[LeaseWatch, ...], tuple[LeaseDrop, ...], tuple[PullJob, ...]]:
        """What is to be told to the data half."""
        out = tuple(self._watches), tuple(self._drops), tuple(self._pulls)
        self._watches, self._drops, self._pulls = [], [], []
        return out

    def appeared(self, lease: str) -> None:
        """All of a watched lease can be read now."""
        for wanted in self._wanted.values():
            wanted.there = wanted.there or wanted.hint.lease == lease

    @property
    def awaits_prompts(self) -> bool:
        """Somebody is to be looked at again as soon as its prompt can be read."""
        return self._by_layer and any(w.stage is Stage.OFFERED and not w.there for w in self._wanted.values())

    def lost(self, lease: str) -> tuple[Readiness, ...]:
        """The producer knows no such lease any more; who ends by that. One that is being fetched fails there, and is
        reported."""
        over = []
        for request_id, wanted in self._wanted.items():
            if wanted.hint.lease == lease and wanted.stage is Stage.OFFERED:
                self.counts["lost"] += 1
                self._give_up(wanted)
                if self._on_failure is OnFailure.FAIL:
                    over.append(Readiness(request_id, error=_failed(wanted.hint, "its lease there is over")))
        return tuple(over)

    def report(self, job: JobReport) -> tuple[Readiness | None, str | None]:
        """A fetch ended: who may go on, or whose blocks may go."""
        request_id = self._jobs.pop(job.job, None)
        wanted = None if request_id is None else self._wanted[request_id]
        if request_id is None or wanted is None or wanted.pull is None:
            return None, None  # said before
        tokens = good_tokens(wanted.pull, job.good, self._sizes, wanted.promised)
        whole = tokens == wanted.promised
        came = max(0, tokens - wanted.local)
        self.counts["fetched" if whole else "partly_fetched" if came else "failed"] += 1
        self.num_tokens += came
        self.counts["in_step"] += wanted.pull.in_step
        wanted.pull = None
        self._end(wanted, done=whole)
        if wanted.ended:
            del self._wanted[request_id]
            return None, request_id
        if whole or self._on_failure is OnFailure.RECOMPUTE:
            return Readiness(request_id, num_tokens=tokens), None
        return Readiness(request_id, error=_failed(wanted.hint, job.error)), None

    def stats(self) -> dict[str, Any]:
        """For metrics."""
        return {**self.counts, "watched": len(self), "fetching": len(self._jobs), "tokens_fetched": self.num_tokens}


def _failed(hint: Hint, why: str | None) -> str:
    reason = f": {why}" if why else ""
    return f"the KV of this prompt could not be fetched from {hint.address}{reason}; send it again"
