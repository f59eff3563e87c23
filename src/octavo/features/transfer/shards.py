"""Whose bytes are mine, when the two sides of a hand-over split a model over different numbers of ranks (PDX-7).

Promises: for every byte of a page of this rank there is one segment that says at which rank of the other side it lies
and where in that rank's page; each needs no more of the other side's ranks than hold what it needs.
Does not know: sockets, blocks, or how ranks are started.

A page is K then V, each [kv_heads, states, head_dim], then their scales, each [kv_heads, states] (`base.kvspec`): what a
rank holds of it are whole heads, one after the other. With more ranks than heads a head is held by several ranks; what
is not split at all (latent attention) is the same at every rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from octavo.base.kvspec import SCALE_BYTES, KVSpec, dtype_bytes


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of a side."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.size}")

    def heads(self, num_heads: int) -> range:
        """The KV heads this rank holds. Raises `ValueError` for numbers that cannot be split."""
        if num_heads % self.size == 0:
            each = num_heads // self.size
            return range(self.rank * each, (self.rank + 1) * each)
        if self.size % num_heads == 0:
            head = self.rank * num_heads // self.size
            return range(head, head + 1)
        raise ValueError(f"{num_heads} KV heads cannot be split over {self.size} ranks")


@dataclass(frozen=True, slots=True)
class Segment:
    """`length` bytes at `theirs` in the page of their rank `rank` are those at `mine` in a page here."""

    rank: int
    theirs: int
    mine: int
    length: int


def segments(
    spec: KVSpec, num_heads: int, mine: Shard, their_size: int, *, replicated: bool = False
) -> tuple[Segment, ...]:
    """How a page of this rank is put together.

    `spec` is this rank's (its `num_kv_heads` are those it holds), `num_heads` the model's. `replicated`: every rank has
    the whole page, and asks the one that has its place on the other side. Raises `ValueError`.
    """
    if replicated:
        return (Segment(mine.rank % their_size, 0, 0, spec.content_bytes),)
    here = mine.heads(num_heads)
    if spec.num_kv_heads != len(here):
        raise ValueError(f"rank {mine.rank} of {mine.size} holds {len(here)} KV heads, its pages {spec.num_kv_heads}")
    there = [Shard(rank, their_size).heads(num_heads) for rank in range(their_size)]
    out: list[Segment] = []
    mine_at = theirs_at = 0
    for per_head in _parts(spec):
        for head in here:
            rank = _holder(head, there, mine)
            offset = theirs_at + (head - there[rank].start) * per_head
            _append(out, Segment(rank, offset, mine_at + (head - here.start) * per_head, per_head))
        mine_at += len(here) * per_head
        theirs_at += len(there[0]) * per_head
    return tuple(out)


def _parts(spec: KVSpec) -> Iterator[int]:
    """Bytes of one head in each part of a page, in order."""
    values = spec.states_per_block * spec.head_dim * dtype_bytes(spec.dtype)
    yield from (values, values)
    if spec.is_scaled:
        scales = spec.states_per_block * SCALE_BYTES
        yield from (scales, scales)


def _holder(head: int, there: list[range], mine: Shard) -> int:
    """The rank to ask for a head: of several that hold it, those of this side take turns."""
    holders = [rank for rank, heads in enumerate(there) if head in heads]
    return holders[mine.rank % len(holders)]


def _append(out: list[Segment], new: Segment) -> None:
    """Add it, or lengthen the last one where the two touch on both sides."""
    last = out[-1] if out else None
    if (
        last is not None
        and last.rank == new.rank
        and last.theirs + last.length == new.theirs
        and last.mine + last.length == new.mine
    ):
        out[-1] = Segment(last.rank, last.theirs, last.mine, last.length + new.length)
    else:
        out.append(new)
