"""A plan being written: a transaction over budgets, blocks, constraints and counters.

Promises: `try_add` takes everything a row needs or nothing; `drop` gives back exactly what the row took; `seal`
makes the frozen batch.
Does not know: who should run (see `order`) or why (see `scheduler`).
"""

from collections.abc import Sequence

import numpy as np

from octavo.base.step import BatchPlan, Ints, NewRow, PlanPart, Ragged, StepPlan, as_ints
from octavo.kvcache.manager import KVCacheManager, PrefixHit, Reservation
from octavo.scheduler.request import Request, Rule


class TokenBudget:
    """What one step may still take, in tokens (SCH-3).

    Each row takes from `left`; its drafts take from `spare` first, the room that the batch has beyond what may be
    scheduled. Prompt chunks are cut to `prefill_chunk`, and all together to `prompts`, so that nobody who decodes goes
    without.

    Owns: the four numbers.
    """

    __slots__ = ("left", "prefill_chunk", "prompts", "spare")

    def __init__(self, scheduled: int, batched: int, *, prefill_chunk: int, prompts: int) -> None:
        self.left = scheduled
        self.spare = batched - scheduled
        self.prefill_chunk = prefill_chunk
        self.prompts = prompts

    def cap(self, n: int, drafts: int, in_prompt: bool) -> int:
        """At most this many of `n` tokens, `drafts` of which are guesses."""
        if in_prompt:
            return max(0, min(n, self.prefill_chunk, self.prompts, self.left))
        return min(n, self.left + min(drafts, self.spare)) if self.left > 0 else 0


class RowTake:
    """What one row took, for rows that took more than one token of the budget.

    Owns: its fields; the builder moves `row` and counts `spare`.
    """

    __slots__ = ("constraints", "count", "drafts", "in_prompt", "reservation", "reserved", "row", "sample", "spare")

    def __init__(self, row: int, count: int, sample: int, drafts: int, in_prompt: bool) -> None:
        self.row = row
        self.count = count
        self.sample = sample
        self.drafts = drafts
        self.spare = 0
        self.in_prompt = in_prompt
        self.reserved = 0  # the room its blocks had before
        self.reservation: Reservation | None = None
        self.constraints: tuple[Rule, ...] = ()

    def keep(self, constraints: tuple[Rule, ...], reservation: Reservation | None, reserved: int) -> None:
        """What `drop` gives back beside tokens: whom to tell, the blocks, and the room there was without them."""
        self.constraints = constraints
        self.reservation = reservation
        self.reserved = reserved


class _Settled:
    """A request as it was before the steps in flight, for the KV manager.

    Owns: nothing.
    """

    __slots__ = ("block_hashes", "num_computed_tokens", "num_tokens", "reads_prefix_cache", "request_id")

    def __init__(self, req: Request, num_settled_tokens: int) -> None:
        self.request_id = req.request_id
        self.num_tokens = req.num_tokens
        self.num_computed_tokens = num_settled_tokens
        self.block_hashes = req.block_hashes
        self.reads_prefix_cache = req.reads_prefix_cache


class PlanBuilder:
    """The rows of step `seq` so far, and what they took.

    A row that computes one token in blocks it has is only in `rows` and `num_computed_tokens`; every other has a `RowTake` too.
    `num_in_flight` is how many submitted steps have not come back: with 0 every token is known.
    `short` says that somebody who runs found no blocks: then nobody is admitted.

    Owns: the rows, their takes, the budget, and who was preempted. Its requests count for themselves.
    """

    __slots__ = (
        "_kv",
        "budget",
        "new",
        "num_computed_tokens",
        "num_in_flight",
        "preempted",
        "rows",
        "seq",
        "short",
        "takes",
    )

    def __init__(self, seq: int, budget: TokenBudget, kv: KVCacheManager, *, num_in_flight: int = 0) -> None:
        self.seq = seq
        self.budget = budget
        self.num_in_flight = num_in_flight
        self.rows: list[Request] = []
        self.num_computed_tokens: list[int] = []
        self.takes: dict[Request, RowTake] = {}
        self.new: list[tuple[Request, tuple[tuple[int, ...], ...]]] = []
        self.preempted: list[Request] = []
        self.short = False
        self._kv = kv

    def add_decode(self, req: Request) -> bool:
        """The hot path: one token, in a block it has, for a request that no rule limits. False: it is none of these."""
        start = req.schedule_next(self.seq)
        if start is None:
            return False
        self.rows.append(req)
        self.num_computed_tokens.append(start)
        self.budget.left -= 1
        return True

    def try_add(
        self,
        req: Request,
        n: int,
        *,
        in_prompt: bool = False,
        constraints: tuple[Rule, ...] = (),
        hit: PrefixHit | None = None,
        external_tokens: int = 0,
        admission: bool = False,
        beside_others: bool = False,
        num_settled_tokens: int | None = None,
    ) -> bool:
        """Take `n` tokens after `req.num_computed_tokens`, blocks for them, and what the constraints count.

        False, and nothing is taken, when there are no blocks. `n` was capped before. With `num_settled_tokens`,
        blocks that a window has passed go back only as if no more than so many tokens were computed.
        """
        start, room = req.num_computed_tokens, req.num_reserved_tokens
        reservation = None
        if admission or start + n > room:
            settled = start if num_settled_tokens is None else num_settled_tokens
            reservation = self._kv.reserve(
                req if settled == start else _Settled(req, settled),
                n + start - settled,
                hit=hit,
                external_tokens=external_tokens,
                admission=admission,
                beside_others=beside_others,
            )
            if reservation is None:
                return False
            req.reserved(max(room, start + n))
        known = req.num_tokens + req.num_placeholders
        drafts = max(0, start + n - known)
        sample = 1 if start + n >= known and known < req.max_total_tokens else 0
        take = RowTake(len(self.rows), n, sample, drafts, in_prompt)
        take.keep(constraints, reservation, room)
        self._spend(take, 1)
        self.rows.append(req)
        self.num_computed_tokens.append(start)
        self.takes[req] = take
        req.schedule(n, sample=sample, drafts=drafts, seq=self.seq)
        for rule in constraints:
            rule.commit(req, n, self)
        return True

    def _spend(self, take: RowTake, sign: int) -> None:
        budget = self.budget
        if sign > 0:
            take.spare = min(take.drafts, budget.spare)
        budget.spare -= sign * take.spare
        budget.left -= sign * (take.count - take.spare)
        if take.in_prompt:
            budget.prompts -= sign * take.count

    def drop(self, req: Request) -> None:
        """Give back all that this row took, as if it had never been added (SCH-12). Not a row: nothing happens."""
        if req not in self.rows:
            return
        row = self.rows.index(req)
        start = self.num_computed_tokens.pop(row)
        del self.rows[row]
        for other in self.takes.values():
            other.row -= other.row > row
        self.new = [entry for entry in self.new if entry[0] is not req]
        take = self.takes.pop(req, None)
        if take is None:
            self.budget.left += 1
            req.unschedule(start, sample=1, drafts=0)
            return
        req.unschedule(start, sample=take.sample, drafts=take.drafts)
        self._spend(take, -1)
        for rule in reversed(take.constraints):
            rule.undo(req, self)
        if take.reservation is not None:
            self._kv.cancel(take.reservation)
            req.unreserve(take.reserved)

    def reserved(self, req: Request) -> tuple[tuple[int, ...], ...]:
        """Blocks by group that this row got in this step."""
        take = self.takes.get(req)
        return () if take is None or take.reservation is None else take.reservation.new_blocks

    def seal(
        self,
        *,
        slots: Ints,
        finished: tuple[int, ...],
        preempted: tuple[int, ...],
        parts: tuple[PlanPart, ...],
        late: tuple[str, ...],
        num_groups: int,
    ) -> StepPlan:
        """The frozen plan. `slots` are the slots of `rows`."""
        num_rows = len(self.rows)
        counts = samples = _ones(num_rows)
        drafts = _zeros(num_rows)
        if self.takes:
            counts, samples, drafts = self._columns(num_rows)
        batch = BatchPlan(
            new=tuple(_new_row(req) for req, _ in self.new),
            slots=slots,
            num_computed_tokens=as_ints(self.num_computed_tokens),
            num_scheduled_tokens=counts,
            num_sampled_tokens=samples,
            num_draft_tokens=drafts,
            new_blocks=self._new_blocks(num_rows, num_groups),
        )
        return StepPlan(seq=self.seq, batch=batch, finished=finished, preempted=preempted, parts=parts, late=late)

    def _columns(self, num_rows: int) -> tuple[Ints, Ints, Ints]:
        table = np.ones((3, num_rows), dtype=np.int32)
        table[2] = 0
        rows = [take.row for take in self.takes.values()]
        table[:, rows] = np.array(
            [(take.count, take.sample, take.drafts) for take in self.takes.values()], dtype=np.int32
        ).T
        table.flags.writeable = False
        return table[0], table[1], table[2]

    def _new_blocks(self, num_rows: int, num_groups: int) -> tuple[Ragged, ...]:
        rows: list[tuple[int, tuple[tuple[int, ...], ...]]] = []
        whole = dict(self.new)
        for req, take in self.takes.items():
            if take.reservation is not None:
                rows.append((take.row, whole.get(req, take.reservation.new_blocks)))
        if not rows:
            return (Ragged(_zeros(num_rows + 1), _zeros(0)),) * num_groups
        rows.sort()
        return tuple(_ragged(num_rows, [(row, blocks[g]) for row, blocks in rows]) for g in range(num_groups))


def _ragged(num_rows: int, entries: Sequence[tuple[int, tuple[int, ...]]]) -> Ragged:
    """A `Ragged` that is empty but for the rows in `entries`, which come in row order."""
    lengths = np.zeros(num_rows + 1, dtype=np.int32)
    lengths[[row + 1 for row, _ in entries]] = [len(blocks) for _, blocks in entries]
    offsets = np.cumsum(lengths, dtype=np.int32)
    offsets.flags.writeable = False
    return Ragged(offsets, as_ints([block for _, blocks in entries for block in blocks]))


def _new_row(req: Request) -> NewRow:
    source = req.source
    if req.slot is None:
        raise RuntimeError(f"request {req.request_id} is in the batch without a slot")
    return NewRow(
        slot=req.slot,
        request_id=req.request_id,
        tokens=req.known_tokens(),
        num_prompt_tokens=req.num_prompt_tokens,
        sampling=source.sampling,
        eos_token_ids=source.eos_token_ids,
        bad_words_ids=source.bad_words_ids,
        sample_index=source.sample_index,
        resumed=req.num_preemptions > 0,
    )


def _filled(value: int) -> Ints:
    return as_ints(np.full(4096, value, dtype=np.int32))


_ONES = _filled(1)  # constants that most batches are views of; read-only
_ZEROS = _filled(0)


def _ones(n: int) -> Ints:
    return _ONES[:n] if n <= len(_ONES) else as_ints(np.ones(n, dtype=np.int32))


def _zeros(n: int) -> Ints:
    return _ZEROS[:n] if n <= len(_ZEROS) else as_ints(np.zeros(n, dtype=np.int32))
