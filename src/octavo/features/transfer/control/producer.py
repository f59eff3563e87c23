"""The producer's side of a hand-over: finished prompts are kept under leases (PDX-5, PDX-8, SCH-33).

Promises: what was saved while a prompt was computed counts for nothing unless its request ended well; blocks under a lease belong to nobody else until the data half has said that nothing reads them; every lease
ends, by being done, given up or left alone.
Does not know: sockets or bytes, or who consumes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from octavo.base.types import FinishReason
from octavo.features.transfer.control.lease import LeaseEnd, LeaseTable
from octavo.features.transfer.disagg import (
    ASK,
    Grant,
    Hint,
    LeaseEvent,
    LeaseNews,
    Save,
    TransferHint,
    TransferOffer,
    prompt_digest,
)
from octavo.plugins.features import BlocksOf
from octavo.scheduler.seams import FinishHold

if TYPE_CHECKING:
    from octavo.scheduler.plan_builder import PlanBuilder
    from octavo.scheduler.request import Request

TRANSPORT: Final = "transport"  # the one reader of a lease that its table knows: all sockets together


@dataclass(slots=True)
class _Early:
    """A prompt that is saved while it is computed. Owns: its lease to be, and how many of its tokens were saved."""

    lease: str | None = None
    end: int = 0


class Producer:
    """Keeps finished prompts for others.

    Owns: the leases, which request's blocks each of them holds, and what is to be told to the data half.
    """

    def __init__(
        self,
        *,
        address: str,
        lease_s: float,
        blocks_of: BlocksOf,
        clock: Callable[[], float],
        new_id: Callable[[], str],
        block_sizes: Sequence[int] = (),
    ) -> None:
        """`block_sizes`, by group: prompts are saved while they are computed; empty: they are not."""
        self._address, self._lease_s = address, lease_s
        self._blocks_of = blocks_of
        self._new_id = new_id
        self._table = LeaseTable(clock, lease_s=lease_s)
        self._requests: dict[str, str] = {}  # lease -> request
        self._grants: list[Grant] = []
        self._sizes = tuple(block_sizes)
        self._early: dict[str, _Early] = {}  # live requests that are saved while they are computed
        self._forgets: list[str] = []
        self._form: dict[str, str] = {}
        self._revoked: set[str] = set()  # told to the data half, and not yet closed by it
        self.num_granted = 0
        self.num_saved = 0

    def __len__(self) -> int:
        """Leases whose blocks are still held."""
        return len(self._requests)

    @property
    def has_news(self) -> bool:
        """The data half is to be told of a lease."""
        return bool(self._grants or self._forgets)

    def handshake(self, form: Mapping[str, str]) -> None:
        """What consumers are to know of the data half."""
        self._form = dict(form)

    def arrive(self, req: "Request") -> None:
        """Note a prompt that is to be kept, and can be saved while it is computed."""
        if self._sizes and _asks(req):
            self._early[req.request_id] = _Early()

    def saves(self, builder: "PlanBuilder") -> tuple[Save, ...]:
        """What this step completes of prompts that are to be kept."""
        if not self._early:
            return ()
        found = []
        for req, start in zip(builder.rows, builder.num_computed_tokens, strict=True):
            early = self._early.get(req.request_id)
            if early is not None and start < req.num_prompt_tokens:
                found.append(self._save(req, early, min(req.num_computed_tokens, req.num_prompt_tokens)))
        return tuple(found)

    def _save(self, req: "Request", early: "_Early", end: int) -> Save:
        """Blocks that are full, or as full as the prompt makes them, and were not saved yet."""
        early.lease = early.lease or self._new_id() + prompt_digest(req.source)
        tables = self._blocks_of(req.request_id)
        whole = end >= req.num_prompt_tokens
        places = tuple(
            tuple(i for i in range(early.end // size, -(-end // size) if whole else end // size) if table[i])
            for table, size in zip(tables, self._sizes, strict=True)
        )
        self.num_saved += end - early.end
        early.end = end
        blocks = tuple(tuple(table[i] for i in row) for table, row in zip(tables, places, strict=True))
        return Save(lease=early.lease, places=places, blocks=blocks)

    def preempted(self, req: "Request") -> None:
        """It is computed anew, in other blocks: what was saved is forgotten."""
        if req.request_id in self._early:
            self._drop_early(req.request_id)
            self._early[req.request_id] = _Early()

    def left(self, req: "Request") -> None:
        """It ended, and its blocks are kept by somebody else: it is offered to nobody."""
        self._drop_early(req.request_id)

    def _drop_early(self, request_id: str) -> None:
        early = self._early.pop(request_id, None)
        if early is not None and early.lease is not None:
            self._forgets.append(early.lease)

    def offer(self, req: "Request") -> FinishHold:
        """Hold the blocks of a prompt that was computed, where that was asked for."""
        blocks = self._blocks_of(req.request_id) if _asks(req) and _ended_well(req) else ()
        if not any(map(len, blocks)):
            self._drop_early(req.request_id)
            return FinishHold()
        early = self._early.pop(req.request_id, None)
        lease = (None if early is None else early.lease) or self._new_id() + prompt_digest(req.source)
        self._table.grant(lease)
        self._table.begin_read(lease, TRANSPORT)
        self._requests[lease] = req.request_id
        self._grants.append(Grant(lease=lease, blocks=blocks))
        self.num_granted += 1
        offer = Hint(
            address=self._address,
            lease=lease,
            num_tokens=req.num_prompt_tokens,
            lease_s=self._lease_s,
            form=self._form,
        )
        return FinishHold(holds_blocks=True, parts=(TransferOffer(offer.as_params()),))

    def forgets(self) -> tuple[str, ...]:
        """Leases that were saved for and will not be granted."""
        forgets, self._forgets = tuple(self._forgets), []
        return forgets

    def take(self) -> tuple[tuple[Grant, ...], tuple[str, ...]]:
        """New leases, and those that nobody may begin to read any more; time passes here."""
        self._table.expire()
        revokes = tuple(lease for lease in self._table.fenced() if lease not in self._revoked)
        self._revoked.update(revokes)
        grants, self._grants = tuple(self._grants), []
        return grants, revokes

    def hear(self, event: LeaseEvent) -> str | None:
        """A notice; the request whose blocks may go now, if any."""
        table = self._table
        if event.news is LeaseNews.HEARTBEAT:
            table.renew(event.lease)
        elif event.news is LeaseNews.DONE:
            table.end(event.lease, LeaseEnd.DONE)
        elif event.news is LeaseNews.ABORTED:
            table.end(event.lease, LeaseEnd.ABORTED)
        elif event.news is LeaseNews.CLOSED and table.end_read(event.lease, TRANSPORT):
            self._revoked.discard(event.lease)
            return self._requests.pop(event.lease)
        return None

    def give_up_oldest(self) -> None:
        """End the lease that was given first: its blocks are needed here, and who would have read them computes."""
        over = set(self._table.fenced())
        oldest = next((lease for lease in self._requests if lease not in over), None)
        if oldest is not None:
            self._table.end(oldest, LeaseEnd.ABORTED)

    def next_deadline(self) -> float | None:
        """When a lease may end."""
        return self._table.next_deadline()

    def stats(self) -> dict[str, Any]:
        """For metrics."""
        counts = self._table.counts
        return {
            "leases": len(self._requests),
            "leases_granted": self.num_granted,
            "tokens_saved_early": self.num_saved,
            "leases_fenced": len(self._table.fenced()),
            **{f"leases_{end.value}": count for end, count in counts.items()},
            "notices_ignored": self._table.num_ignored,
        }


def _asks(req: "Request") -> bool:
    hint = req.source.part(TransferHint)
    return hint is not None and bool(hint.data.get(ASK))


def _ended_well(req: "Request") -> bool:
    return req.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
