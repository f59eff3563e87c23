"""One step's rows as the model sees them: token ids, positions, slots and lengths.

Promises: built from the plan and the table by array operations only, nothing per token or row in Python; the same
for a prompt chunk, a decode step and any mix.
Does not know: parameters, features, or the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.attention.batch import AttentionBatch
from octavo.base.step import BatchPlan, Ints
from octavo.forward.context import BatchShape
from octavo.worker.buffers import StepBuffer, to_device
from octavo.worker.table import RequestTable

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """The buffers that every batch of one batcher begins, at their full size: what a recorded pass reads."""

    token_ids: Tensor  # [most tokens] int64
    positions: Tensor  # [most tokens] int64
    slot_mappings: tuple[Tensor, ...]  # [G] of [most tokens] int64


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch:
    """R rows, T tokens, N sampled rows, G groups. Tensors are valid until the next batch is built."""

    slots: Ints  # [R]
    num_computed_tokens: Ints  # [R], first position computed
    num_scheduled_tokens: Ints  # [R]
    query_starts: Ints  # [R + 1]
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    sample_rows: Longs  # [N], rows that yield a token
    sample_index: Tensor  # [N] int64, those rows' last tokens in [T]
    sample_lengths: Longs  # [N], tokens that those rows know
    groups: tuple[AttentionBatch, ...]
    slot_mappings: tuple[Tensor, ...]  # [G] of [T] int64, token slots
    inputs: StepInputs
    shape: BatchShape

    @property
    def num_rows(self) -> int:
        """Number of requests."""
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """Number of tokens computed."""
        return self.shape.num_tokens


class InputBatcher:
    """Builds batches into buffers that persist.

    Owns: the buffers of token ids, positions and each group's slots, and tables of numbers that never change.
    """

    def __init__(self, *, max_num_tokens: int, block_sizes: Sequence[int], device: torch.device) -> None:
        self._device = device
        self._block_sizes = tuple(block_sizes)
        self._token_ids = StepBuffer(max_num_tokens, device)
        self._positions = StepBuffer(max_num_tokens, device)
        self._slots = tuple(StepBuffer(max_num_tokens, device) for _ in block_sizes)
        self._inputs = StepInputs(
            token_ids=self._token_ids.whole,
            positions=self._positions.whole,
            slot_mappings=tuple(buffer.whole for buffer in self._slots),
        )
        # What most index arrays are views of.
        self._index = torch.arange(max_num_tokens, device=device)
        self._numbers = np.arange(max_num_tokens)
        self._starts = np.arange(max_num_tokens + 1, dtype=np.int32)
        self._numbers.flags.writeable = self._starts.flags.writeable = False

    def build(self, plan: BatchPlan, table: RequestTable) -> InputBatch:
        """The plan's rows, on the state that `table` is in."""
        rows = self._rows(plan)
        total = len(rows.positions)
        self._token_ids.room(total)[:] = table.token_ids[rows.token_slot, rows.positions]
        sample_rows, sample_index, sample_lengths = self._sampled(plan, rows)
        return InputBatch(
            slots=plan.slots,
            num_computed_tokens=plan.num_computed_tokens,
            num_scheduled_tokens=plan.num_scheduled_tokens,
            query_starts=rows.query_starts,
            token_ids=self._token_ids.tensor(total),
            positions=self._positions.tensor(total),
            sample_rows=sample_rows,
            sample_index=sample_index,
            sample_lengths=sample_lengths,
            groups=tuple(self._group(g, plan, rows, table) for g in range(len(self._block_sizes))),
            slot_mappings=tuple(buffer.tensor(total) for buffer in self._slots),
            inputs=self._inputs,
            shape=BatchShape(num_tokens=total, num_rows=plan.num_rows, uniform=total == plan.num_rows),
        )

    def _sampled(self, plan: BatchPlan, rows: "_Rows") -> tuple[Longs, Tensor, Longs]:
        """Rows that yield a token, the places of their last tokens, and how many tokens they know."""
        count = plan.num_rows
        if rows.max_query_len == 1 and plan.num_sampled_tokens.all():
            return self._numbers[:count], self._index[:count], rows.seq_lens.astype(np.int64)
        sampled = plan.num_sampled_tokens > 0
        places = rows.query_starts[1:][sampled].astype(np.int64) - 1
        return np.flatnonzero(sampled), to_device(places, self._device), rows.seq_lens[sampled].astype(np.int64)

    def _rows(self, plan: BatchPlan) -> "_Rows":
        longest = int(plan.num_scheduled_tokens.max(initial=0))
        if longest == 1:  # one token a row: rows are tokens
            positions = self._positions.room(plan.num_rows)
            positions[:] = plan.num_computed_tokens
            return _Rows(
                self._starts[: plan.num_rows + 1],
                plan.num_computed_tokens + plan.num_scheduled_tokens,
                plan.slots,
                positions,
                longest,
            )
        query_starts = np.zeros(plan.num_rows + 1, dtype=np.int32)
        np.cumsum(plan.num_scheduled_tokens, out=query_starts[1:])
        total = int(query_starts[-1])
        token_row = np.repeat(np.arange(plan.num_rows), plan.num_scheduled_tokens)
        positions = self._positions.room(total)
        np.subtract(np.arange(total), (query_starts[:-1] - plan.num_computed_tokens)[token_row], out=positions)
        return _Rows(
            query_starts,
            plan.num_computed_tokens + plan.num_scheduled_tokens,
            plan.slots[token_row],
            positions,
            longest,
        )

    def _group(self, group: int, plan: BatchPlan, rows: "_Rows", table: RequestTable) -> AttentionBatch:
        size, blocks = self._block_sizes[group], table.block_tables[group]
        room = self._slots[group].room(len(rows.positions))
        index = rows.positions // size
        np.multiply(blocks[rows.token_slot, index], size, out=room, dtype=np.int64)
        room += rows.positions - index * size
        longest = int(rows.seq_lens.max(initial=0))
        return AttentionBatch(
            query_starts=rows.query_starts,
            query_lens=plan.num_scheduled_tokens,
            context_lens=plan.num_computed_tokens,
            seq_lens=rows.seq_lens,
            block_table=blocks[plan.slots, : max(1, -(-longest // size))],
            slot_mapping=room,
            num_tokens=len(rows.positions),
            max_query_len=rows.max_query_len,
            max_seq_len=longest,
        )


@dataclass(frozen=True, slots=True)
class _Rows:
    """What all groups share."""

    query_starts: Ints  # [R + 1]
    seq_lens: Ints  # [R]
    token_slot: Ints  # [T], the request's slot of each token
    positions: Longs  # [T]
    max_query_len: int
