"""The request table against a dictionary that does the same slowly (EXE-11, EXE-12)."""

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from octavo.base.params import SamplingParams
from octavo.base.step import BatchPlan, NewRow, StepPlan, as_ints, ragged
from octavo.worker.table import RequestTable

SLOTS, LENGTH, SIZES = 4, 30, (4, 8)


def new_row(slot: int, tokens: tuple[int, ...], name: str = "r") -> NewRow:
    return NewRow(slot=slot, request_id=name, tokens=tokens, num_prompt_tokens=len(tokens), sampling=SamplingParams())


def plan(rows: list[tuple[int, int, int]], **fields: Any) -> StepPlan:
    """`rows` are (slot, start, count)."""
    blocks = fields.pop("blocks", None) or [[[] for _ in rows] for _ in SIZES]
    zero = fields.pop("zero", ())
    batch = BatchPlan(
        new=tuple(fields.pop("new", ())),
        slots=as_ints([r[0] for r in rows]),
        num_computed_tokens=as_ints([r[1] for r in rows]),
        num_scheduled_tokens=as_ints([r[2] for r in rows]),
        num_sampled_tokens=as_ints([1] * len(rows)),
        num_draft_tokens=as_ints([0] * len(rows)),
        new_blocks=tuple(ragged(b) for b in blocks),
        blocks_to_zero=zero,
    )
    return StepPlan(seq=0, batch=batch, **fields)


class Recorder:
    """A listener that writes down what it hears."""

    def __init__(self, heard: list[Any] | None = None) -> None:
        self.heard: list[Any] = [] if heard is None else heard

    def enter(self, row: NewRow) -> None:
        self.heard.append(("enter", row.slot))
        if row.request_id == "poison":
            raise ValueError("bad row")

    def leave(self, slot: int) -> None:
        self.heard.append(("leave", slot))


def make(listener: Recorder | None = None) -> RequestTable:
    listeners = (listener,) if listener else ()
    return RequestTable(max_num_seqs=SLOTS, max_model_len=LENGTH, block_sizes=SIZES, listeners=listeners)


class TableMachine(RuleBasedStateMachine):
    """Random plans: the table always says what the dictionary says."""

    @initialize()
    def start(self) -> None:
        self.table = make()
        self.model: dict[int, dict[str, Any]] = {}
        self.next_block = 1

    def take(self, count: int) -> list[int]:
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        leave = [s for s in self.model if data.draw(st.booleans())]
        finished = [s for s in leave if data.draw(st.booleans())]
        for slot in leave:
            del self.model[slot]
        new = []
        for slot in range(SLOTS):
            if slot not in self.model and data.draw(st.booleans()):  # perhaps one that was freed just now
                tokens = tuple(data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=20)))
                new.append(new_row(slot, tokens))
                self.model[slot] = {"tokens": list(tokens), "blocks": [[] for _ in SIZES]}
        slots = data.draw(st.permutations(sorted(self.model)))
        rows, blocks = [], [[] for _ in SIZES]
        for slot in slots:
            mine = self.model[slot]
            count = len(mine["tokens"])
            rows.append((slot, 0, count))
            for group, size in enumerate(SIZES):
                fresh = self.take(max(0, -(-count // size) - len(mine["blocks"][group])))
                mine["blocks"][group] += fresh
                blocks[group].append(fresh)
        preempted = tuple(s for s in leave if s not in finished)
        self.table.apply(
            plan(rows, new=new, blocks=blocks, finished=tuple(finished), preempted=preempted), lambda blocks: None
        )
        sampled = [s for s in slots if data.draw(st.booleans())]
        ids = data.draw(st.lists(st.integers(0, 99), min_size=len(sampled), max_size=len(sampled)))
        self.table.append(as_ints(sampled), np.array(ids, dtype=np.int64))
        for slot, token in zip(sampled, ids, strict=True):
            if len(self.model[slot]["tokens"]) < LENGTH + 1:
                self.model[slot]["tokens"].append(token)

    @invariant()
    def agrees(self) -> None:
        assert self.table.live == set(self.model)
        for slot in range(SLOTS):
            mine = self.model.get(slot, {"tokens": [], "blocks": [[] for _ in SIZES]})
            count = self.table.num_tokens[slot]
            assert self.table.token_ids[slot, :count].tolist() == mine["tokens"]
            for group in range(len(SIZES)):
                held = self.table.num_blocks[group][slot]
                line = self.table.block_tables[group][slot]
                assert line[:held].tolist() == mine["blocks"][group]
                assert not line[held:].any(), "unused entries point at the null block (EXE-15)"


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)


def test_a_plan_is_applied_in_its_order() -> None:
    """EXE-12: finished, zeroed blocks, preempted, new; a slot freed here may be given anew."""
    heard: list[Any] = []
    table = make(Recorder(heard))
    table.apply(plan([], new=[new_row(0, (1,)), new_row(1, (2,))]), lambda b: None)
    heard.clear()
    both = [new_row(1, (7,)), new_row(0, (8, 9))]
    table.apply(
        plan([(0, 0, 2)], new=both, blocks=[[[3]], [[4]]], finished=(0,), preempted=(1,), zero=(3, 4)),
        lambda blocks: heard.append(("zero", tuple(blocks))),
    )
    assert heard == [("leave", 0), ("zero", (3, 4)), ("leave", 1), ("enter", 1), ("enter", 0)]
    assert table.num_tokens[:2].tolist() == [2, 1] and table.token_ids[0, :2].tolist() == [8, 9]


def test_a_row_that_cannot_enter_fails_alone() -> None:
    table = make(Recorder())
    rows = [new_row(2, (1,), "poison"), new_row(3, (2,))]
    errors = table.apply(plan([(3, 0, 1), (2, 0, 1)], new=rows, blocks=[[[1], [2]], [[3], [4]]]), lambda b: None)
    assert [(e.row, "bad row" in e.message) for e in errors] == [(1, True)]
    assert table.live == {2, 3}


def test_plans_that_cannot_be_right_are_refused() -> None:
    table = make()
    table.apply(plan([(0, 0, 3)], new=[new_row(0, (1, 2, 3))], blocks=[[[1]], [[2]]]), lambda b: None)
    with pytest.raises(RuntimeError, match="slot 0"):
        table.apply(plan([], new=[new_row(0, (1,))]), lambda b: None)
    with pytest.raises(RuntimeError, match="do not have"):
        table.apply(plan([(0, 3, 1)]), lambda b: None)
    table.append(as_ints([0, 0][:1]), np.array([5]))
    table.append(as_ints([0]), np.array([6]))
    with pytest.raises(RuntimeError, match="group 0"):
        table.apply(plan([(0, 3, 2)]), lambda b: None)
    with pytest.raises(RuntimeError, match="holds"):
        table.apply(plan([], new=[new_row(1, (1,) * (LENGTH + 2))]), lambda b: None)


def test_leaving_twice_and_clearing_are_harmless() -> None:
    table = make()
    table.apply(plan([], new=[new_row(0, (1,)), new_row(2, (1,))]), lambda b: None)
    table.apply(plan([], finished=(0, 0, 3)), lambda b: None)
    table.clear()
    assert table.live == frozenset() and not table.num_tokens.any()
