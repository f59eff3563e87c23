"""The producer's side of a hand-over: finished prompts are kept under leases (PDX-5, PDX-8, SCH-33).

Promises: blocks under a lease belong to nobody else until the data half has said that nothing reads them; every lease
ends, by being done, given up or left alone.
Does not know: sockets or bytes, or who consumes.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from octavo.base.outputs import TransferOffer
from octavo.base.types import FinishReason
from octavo.features.transfer.control.lease import LeaseEnd, LeaseTable
from octavo.features.transfer.handover import ASK, Grant, Hint, LeaseEvent, LeaseNews, prompt_digest
from octavo.scheduler.seams import FinishHold

if TYPE_CHECKING:
    from octavo.scheduler.request import Request

BlocksOf = Callable[[str], tuple[tuple[int, ...], ...]]
TRANSPORT: Final = "transport"  # the one reader of a lease that its table knows: all sockets together


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
    ) -> None:
        self._address, self._lease_s = address, lease_s
        self._blocks_of = blocks_of
        self._new_id = new_id
        self._table = LeaseTable(clock, lease_s=lease_s)
        self._requests: dict[str, str] = {}  # lease -> request
        self._grants: list[Grant] = []
        self._revoked: set[str] = set()  # told to the data half, and not yet closed by it
        self.num_granted = 0

    def __len__(self) -> int:
        """Leases whose blocks are still held."""
        return len(self._requests)

    @property
    def has_news(self) -> bool:
        """The data half is to be told of a lease."""
        return bool(self._grants)

    def offer(self, req: "Request") -> FinishHold:
        """Hold the blocks of a prompt that was computed, where that was asked for."""
        hint = req.source.transfer
        ended_well = req.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if hint is None or not hint.data.get(ASK) or not ended_well:
            return FinishHold()
        blocks = self._blocks_of(req.request_id)
        if not any(map(len, blocks)):
            return FinishHold()
        lease = self._new_id() + prompt_digest(req.source)
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
        )
        return FinishHold(holds_blocks=True, parts=(TransferOffer(offer.as_params()),))

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
        if event.news is LeaseNews.BEAT:
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
            "leases_fenced": len(self._table.fenced()),
            **{f"leases_{end.value}": count for end, count in counts.items()},
            "notices_ignored": self._table.num_ignored,
        }
