"""What the worker remembers of live requests between steps, by slot.

Promises: plans name only what changed; every token of a live request, also those sampled here, is at
`token_ids[slot]`, and its blocks at `block_tables[group][slot]`, ended by null blocks (0).
Does not know: tensors, scheduling, or what the tokens mean.

A step changes the table in the order of EXE-12: finished leave (their slot may be taken again in the same plan),
new blocks are zeroed where a kind needs it, preempted leave, new and resumed rows enter, blocks are appended.
Slots do not move, so nothing is condensed.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from octavo.base.step import BatchPlan, Ints, NewRow, Ragged, RowError, StepPlan


class SlotListener(Protocol):
    """Whoever keeps something of its own for each slot."""

    def enter(self, row: NewRow) -> None:
        """A request takes a slot. What is raised here fails that request only."""

    def leave(self, slot: int) -> None:
        """The slot's request finished or was preempted."""


class RequestTable:
    """Tokens and blocks of the requests in slots. Memory is touched only as far as it is used.

    Owns: `token_ids`, `num_tokens`, `num_prompt`, `block_tables`, `num_blocks`, and which slots are live.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_sizes: Sequence[int],
        listeners: Sequence[SlotListener] = (),
    ) -> None:
        self.max_tokens = max_model_len + 1  # the token sampled at the very end is never computed, but is kept
        self.block_sizes = tuple(block_sizes)
        self.token_ids: Ints = np.zeros((max_num_seqs, self.max_tokens), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self.block_tables: tuple[Ints, ...] = tuple(
            np.zeros((max_num_seqs, self.max_tokens // size + 2), dtype=np.int32) for size in block_sizes
        )
        self.num_blocks: tuple[Ints, ...] = tuple(np.zeros(max_num_seqs, dtype=np.int32) for _ in block_sizes)
        self._live: set[int] = set()
        self._listeners = tuple(listeners)

    def apply(self, plan: StepPlan, zero_blocks: Callable[[Sequence[int]], None]) -> tuple[RowError, ...]:
        """Bring the table to the state that this step computes on. Rows that could not enter are the answer."""
        for slot in plan.finished:
            self._leave(slot)
        if plan.batch.blocks_to_zero:
            zero_blocks(plan.batch.blocks_to_zero)
        for slot in plan.preempted:
            self._leave(slot)
        failed = {row.slot: message for row in plan.batch.new if (message := self._enter(row))}
        for group, blocks in enumerate(plan.batch.new_blocks):
            self._append_blocks(group, plan.batch.slots, blocks)
        self._check(plan.batch)
        if not failed:
            return ()
        return tuple(RowError(i, failed[s]) for i, s in enumerate(plan.batch.slots.tolist()) if s in failed)

    def append(self, slots: Ints, tokens: "Ints | npt.NDArray[np.int64]") -> None:
        """Add one sampled token to each of `slots`; known rows of later plans carry none."""
        at = self.num_tokens[slots]
        room = at < self.max_tokens  # false only for a row that ends in this step anyway
        if not room.all():
            slots, at, tokens = slots[room], at[room], tokens[room]
        self.token_ids[slots, at] = tokens
        self.num_tokens[slots] = at + 1

    def clear(self) -> None:
        """Forget every request."""
        for slot in tuple(self._live):
            self._leave(slot)

    @property
    def live(self) -> frozenset[int]:
        """Slots that are taken."""
        return frozenset(self._live)

    def _enter(self, row: NewRow) -> str | None:
        slot, count = row.slot, len(row.tokens)
        if slot in self._live:
            raise RuntimeError(f"slot {slot} is given to {row.request_id} while another request holds it")
        if count > self.max_tokens:
            raise RuntimeError(f"{row.request_id} has {count} tokens; the table holds {self.max_tokens}")
        self._live.add(slot)
        self.token_ids[slot, :count] = row.tokens
        self.num_tokens[slot] = count
        self.num_prompt[slot] = row.num_prompt_tokens
        try:
            for listener in self._listeners:
                listener.enter(row)
        except Exception as error:  # the border between one request and everybody else's
            return f"the request could not enter the batch: {error!r}"
        return None

    def _leave(self, slot: int) -> None:
        if slot not in self._live:
            return
        self._live.remove(slot)
        for table, count in zip(self.block_tables, self.num_blocks, strict=True):
            table[slot, : count[slot]] = 0
            count[slot] = 0
        self.num_tokens[slot] = 0
        for listener in self._listeners:
            listener.leave(slot)

    def _append_blocks(self, group: int, slots: Ints, blocks: Ragged) -> None:
        if not len(blocks.values):
            return
        added = np.diff(blocks.offsets)
        have = self.num_blocks[group]
        row = np.repeat(slots, added)
        column = np.arange(len(row)) - np.repeat(blocks.offsets[:-1] - have[slots], added)
        self.block_tables[group][row, column] = blocks.values
        have[slots] += added

    def _check(self, batch: BatchPlan) -> None:
        """Our own mistakes, caught before they become somebody's wrong text."""
        ends = batch.num_computed_tokens + batch.num_scheduled_tokens
        if (ends > self.num_tokens[batch.slots]).any():
            rows = np.flatnonzero(ends > self.num_tokens[batch.slots]).tolist()
            raise RuntimeError(f"the plan computes tokens that rows {rows} do not have yet")
        for group, size in enumerate(self.block_sizes):
            if (ends > self.num_blocks[group][batch.slots].astype(np.int64) * size).any():
                raise RuntimeError(f"the plan computes tokens of group {group} for which no block was given")
