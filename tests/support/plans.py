"""Step plans written by hand: the least a scheduler does, for tests of the data plane.

Promises: blocks come out of order and never twice; a request that leaves gives its blocks back.
Does not know: budgets, priorities, or prefixes.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.base.kvspec import KVLayout
from octavo.base.params import SamplingParams
from octavo.base.step import BatchPlan, NewRow, PlanPart, StepPlan, as_ints, ragged


@dataclass
class Live:
    """A request in a slot."""

    computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)


class HandPlanner:
    """Writes plans. `enter` and `leave` are collected until the next `plan`.

    Owns: the free blocks, and what each slot has computed.
    """

    def __init__(self, layout: KVLayout, seed: int = 0) -> None:
        self._layout = layout
        self._free = list(range(1, layout.num_blocks))
        random.Random(seed).shuffle(self._free)
        self._live: dict[int, Live] = {}
        self._new: list[NewRow] = []
        self._finished: list[int] = []
        self._preempted: list[int] = []
        self._seq = 0

    def enter(
        self, slot: int, tokens: Sequence[int], params: SamplingParams | None = None, *, prompt: int = 0, **fields: Any
    ) -> None:
        """A request takes `slot`; `prompt` is its prompt's length when `tokens` has outputs too."""
        self._live[slot] = Live(blocks=[[] for _ in self._layout.groups])
        row = NewRow(
            slot=slot,
            request_id=fields.pop("request_id", f"request-{slot}"),
            tokens=tuple(tokens),
            num_prompt_tokens=prompt or len(tokens),
            sampling=params or SamplingParams(temperature=0.0),
            **fields,
        )
        self._new.append(row)

    def leave(self, slot: int, *, preempted: bool = False) -> None:
        """The slot's request ends, or is preempted."""
        for blocks in self._live.pop(slot).blocks:
            self._free += blocks
        (self._preempted if preempted else self._finished).append(slot)

    def plan(
        self,
        counts: dict[int, int],
        *,
        unsampled: Sequence[int] = (),
        late: Sequence[str] = (),
        parts: Sequence[PlanPart] = (),
    ) -> StepPlan:
        """Compute `counts[slot]` further tokens of each slot, in that order of rows."""
        starts = [self._live[s].computed for s in counts]
        added = [self._grow(s, n) for s, n in counts.items()]
        batch = BatchPlan(
            new=tuple(self._new),
            slots=as_ints(list(counts)),
            num_computed_tokens=as_ints(starts),
            num_scheduled_tokens=as_ints(list(counts.values())),
            num_sampled_tokens=as_ints([0 if s in unsampled else 1 for s in counts]),
            num_draft_tokens=as_ints([0] * len(counts)),
            new_blocks=tuple(ragged([row[g] for row in added]) for g in range(len(self._layout.groups))),
        )
        out = StepPlan(
            seq=self._seq,
            batch=batch,
            finished=tuple(self._finished),
            preempted=tuple(self._preempted),
            parts=tuple(parts),
            late=tuple(late),
        )
        self._seq += 1
        self._new, self._finished, self._preempted = [], [], []
        return out

    def _grow(self, slot: int, count: int) -> list[list[int]]:
        live = self._live[slot]
        live.computed += count
        added = []
        for blocks, group in zip(live.blocks, self._layout.groups, strict=True):
            need = -(-live.computed // group.spec.block_size) - len(blocks)
            fresh = [self._free.pop() for _ in range(max(0, need))]
            blocks += fresh
            added.append(fresh)
        return added
