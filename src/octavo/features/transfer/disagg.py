"""What prefill and decode instances say to each other through their engines: hints, and each half's plan and report.

Promises: a hint is plain JSON that a router carries without reading it; a hint that was altered, or that belongs to
another prompt, is told apart from one that fits; every fetch is reported once.
Does not know: sockets, blocks' owners, or the router.

A *producer* computes a prompt and keeps its blocks under a *lease*; its answer carries a `Hint`. A *consumer* that gets
the prompt with the hint fetches the blocks instead of computing them, and says when it is done (PDX-5, PDX-8).
"""

import hashlib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec
import numpy as np

from octavo.base.errors import ClientError
from octavo.base.outputs import OutputPart
from octavo.base.requests import EngineRequest, RequestPart
from octavo.base.step import PlanPart, ResultPart
from octavo.features.transfer.options import FIELD
from octavo.features.transfer.plan import JobReport

ASK: Final = "do_remote_decode"  # in a request: keep this prompt's KV for somebody
MOST_WORDS: Final = 64  # in what a hint says of its producer
TAKE: Final = "do_remote_prefill"  # in a request: this prompt's KV is there


class TransferRole(StrEnum):
    """Which sides of a hand-over an engine takes."""

    PRODUCER = "producer"
    CONSUMER = "consumer"
    BOTH = "both"

    @property
    def produces(self) -> bool:
        return self is not TransferRole.CONSUMER

    @property
    def consumes(self) -> bool:
        return self is not TransferRole.PRODUCER


class TransferHint(RequestPart, frozen=True):
    """What a request says of its KV (`kv_transfer_params`): where it waits, that it is to be kept, or which tiers to use."""

    data: dict[str, Any] = msgspec.field(default_factory=dict)


class TransferOffer(OutputPart, frozen=True):
    """Where a request's KV can be fetched, as its answer says it."""

    data: dict[str, Any] = msgspec.field(default_factory=dict)


def offered(parts: Sequence[OutputPart]) -> dict[str, Any] | None:
    """Where a request's KV waits, of the parts that came with its answers; None when nothing was kept."""
    offers = [part for part in parts if isinstance(part, TransferOffer)]
    return offers[0].data if offers else None


class Hint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a prompt's KV waits. Durations, not moments: two machines' clocks need not agree."""

    address: str  # of the producer: transport://place
    lease: str  # ends in the digest of its prompt, so that no name of a lease can be put beside another prompt
    num_tokens: int
    lease_s: float
    form: dict[str, str] = {}  # what the producer's data half offered to be known; empty where the transport says it

    def as_params(self) -> dict[str, Any]:
        """As the answer carries it."""
        return {TAKE: True, **msgspec.to_builtins(self)}

    def is_for(self, req: EngineRequest) -> bool:
        """Whether the lease is one of this request's prompt: a producer knows a lease by its whole name only."""
        return self.num_tokens == len(req.prompt_token_ids) and self.lease.endswith(prompt_digest(req))


def read_hint(data: Mapping[str, Any]) -> Hint | None:
    """The hint in a request's parameters; None when they hold none. Raises `ClientError` for one that makes no sense."""
    if not data.get(TAKE):
        return None
    try:
        hint = msgspec.convert({k: v for k, v in data.items() if k != TAKE}, Hint)
    except msgspec.ValidationError as error:
        raise ClientError(
            f"{FIELD} must be passed on as the prefill instance gave it: {error}", param=FIELD, code="invalid_value"
        ) from None
    if not 0 < hint.lease_s <= 86400 or "://" not in hint.address or len(hint.address) + len(hint.lease) > 512:
        raise ClientError(f"{FIELD} must be passed on as the prefill instance gave it", param=FIELD)
    words = [*hint.form, *hint.form.values()]
    if len(words) > MOST_WORDS or not all(len(word) <= 64 and word.isprintable() for word in words):  # they are logged
        raise ClientError(f"{FIELD}.form must be passed on as the prefill instance gave it", param=FIELD)
    return hint


def prompt_digest(req: EngineRequest) -> str:
    """What tells prompts apart whose KV differs: token ids, and the extra keys of the prefix cache (REU-2)."""
    digest = hashlib.sha256(np.asarray(req.prompt_token_ids, dtype="<u4").tobytes())
    adapter = req.adapter
    for extra in (req.cache_salt or "", "" if adapter is None else f"{adapter.name}\0{adapter.digest}"):
        data = extra.encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.hexdigest()[:32]


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """From now on these blocks may be read under the lease: by group, the request's table; 0 where there is none."""

    lease: str
    blocks: tuple[tuple[int, ...], ...]


class Save(msgspec.Struct, frozen=True, kw_only=True):
    """This step completes these blocks of a prompt that is to be kept: by group, places in its table, and the blocks.

    Each layer of them may be read once it was computed in this step. What was not saved so is read under the grant.
    """

    lease: str
    places: tuple[tuple[int, ...], ...]
    blocks: tuple[tuple[int, ...], ...]


class LeaseWatch(msgspec.Struct, frozen=True, kw_only=True):
    """Keep this lease alive at its producer, until it is dropped."""

    lease: str
    address: str
    lease_s: float


class LeaseDrop(msgspec.Struct, frozen=True, kw_only=True):
    """A watched lease is over: everything came (`done`), or it is given up."""

    lease: str
    done: bool


class PullJob(msgspec.Struct, frozen=True, kw_only=True):
    """Fetch blocks under a watched lease: of each group, `places` in the producer's table to `blocks` here.

    The report's `good` follows the groups one after the other. With `in_step` the plan that carries it computes with
    these blocks: each layer waits for its own share of them, and the report comes with that step's result.
    """

    job: int
    lease: str
    places: tuple[tuple[int, ...], ...]
    blocks: tuple[tuple[int, ...], ...]
    in_step: bool = False


class DisaggPlan(PlanPart, frozen=True, kw_only=True):
    """The hand-over's share of a step."""

    grants: tuple[Grant, ...] = ()
    saves: tuple[Save, ...] = ()
    forgets: tuple[str, ...] = ()  # leases that were saved for and will not be granted
    revokes: tuple[str, ...] = ()  # leases that nobody may begin to read any more
    watches: tuple[LeaseWatch, ...] = ()
    drops: tuple[LeaseDrop, ...] = ()
    pulls: tuple[PullJob, ...] = ()


class LeaseNews(StrEnum):
    """What the data half heard of a lease."""

    HEARTBEAT = "beat"  # producer's side: its consumer is alive
    DONE = "done"  # producer's side: its consumer has everything
    ABORTED = "aborted"  # producer's side: its consumer gave up
    CLOSED = "closed"  # producer's side: nothing reads its blocks, and nothing will
    THERE = "there"  # consumer's side: all of the prompt can be read now
    LOST = "lost"  # consumer's side: the producer knows no such lease


class LeaseEvent(msgspec.Struct, frozen=True):
    """One notice, in the order in which they came."""

    lease: str
    news: LeaseNews


class DisaggReport(ResultPart, frozen=True, kw_only=True):
    """Notices and fetches since the last report."""

    events: tuple[LeaseEvent, ...] = ()
    jobs: tuple[JobReport, ...] = ()


def good_tokens(pull: PullJob, good: Sequence[bool], block_sizes: Sequence[int], promised: int) -> int:
    """How many leading tokens are there when these blocks of a pull came: up to the first bad block of any group."""
    if len(good) != sum(map(len, pull.places)):
        return 0
    tokens, at = promised, 0
    for places, size in zip(pull.places, block_sizes, strict=True):
        for place, fine in zip(places, good[at : at + len(places)], strict=True):
            if not fine:
                tokens = min(tokens, place * size)
        at += len(places)
    return tokens


def difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """What differs between two identities, in words; empty when nothing does."""
    names = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    return "; ".join(
        f"{name}: {theirs.get(name, 'not said')} there, {mine.get(name, 'not said')} here" for name in names
    )
