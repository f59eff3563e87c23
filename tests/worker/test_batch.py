"""Batches against a slow twin that goes token by token (EXE-10, EXE-15, ATT-4)."""

import numpy as np
import pytest
import torch

from octavo.base.step import BatchPlan, as_ints, ragged
from octavo.worker.batch import InputBatcher
from octavo.worker.table import RequestTable

SLOTS, LENGTH = 9, 200


def random_table(rng: np.random.Generator, sizes: tuple[int, ...]) -> RequestTable:
    table = RequestTable(max_num_seqs=SLOTS, max_model_len=LENGTH, block_sizes=sizes)
    table.token_ids[:] = rng.integers(0, 1000, table.token_ids.shape)
    table.num_tokens[:] = rng.integers(1, LENGTH, SLOTS)
    for blocks in table.block_tables:
        blocks[:] = rng.permutation(blocks.size).reshape(blocks.shape) + 1
    return table


def random_plan(rng: np.random.Generator, table: RequestTable, rows: int, kind: str) -> BatchPlan:
    slots = rng.permutation(SLOTS)[:rows]
    ends = np.array([rng.integers(1, table.num_tokens[s] + 1) for s in slots], dtype=np.int64)
    counts = np.array([1 if kind != "mixed" or rng.random() < 0.4 else rng.integers(1, e + 1) for e in ends])
    return BatchPlan(
        new=(),
        slots=as_ints(slots),
        num_computed_tokens=as_ints(ends - counts),
        num_scheduled_tokens=as_ints(counts),
        num_sampled_tokens=as_ints([1] * rows if kind == "steady" else rng.integers(0, 2, rows)),
        num_draft_tokens=as_ints([0] * rows),
        new_blocks=(ragged([[]] * rows),),
    )


@pytest.mark.parametrize("sizes", [(1,), (16,), (7, 64)])
@pytest.mark.parametrize("kind", ["steady", "decode", "mixed"])
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_every_field_equals_the_twins(sizes: tuple[int, ...], kind: str, rows: int) -> None:
    rng = np.random.default_rng(rows * 100 + sum(sizes))
    table = random_table(rng, sizes)
    batcher = InputBatcher(max_num_tokens=SLOTS * LENGTH, block_sizes=sizes, device=torch.device("cpu"))
    for _ in range(4):  # the buffers are written again and again
        plan = random_plan(rng, table, rows, kind)
        batch = batcher.build(plan, table)
        ids, positions, slots, starts, last = [], [], [[] for _ in sizes], [0], []
        for row in range(rows):
            slot, start, count = (
                int(a[row]) for a in (plan.slots, plan.num_computed_tokens, plan.num_scheduled_tokens)
            )
            for position in range(start, start + count):
                ids.append(int(table.token_ids[slot, position]))
                positions.append(position)
                for group, size in enumerate(sizes):
                    block = int(table.block_tables[group][slot, position // size])
                    slots[group].append(block * size + position % size)
            starts.append(len(ids))
            if plan.num_sampled_tokens[row]:
                last.append(len(ids) - 1)
        assert batch.token_ids.tolist() == ids and batch.positions.tolist() == positions
        assert batch.query_starts.tolist() == starts and batch.num_tokens == len(ids)
        assert batch.sample_index.tolist() == last
        assert batch.sample_rows.tolist() == np.flatnonzero(plan.num_sampled_tokens).tolist()
        assert batch.sample_lengths.tolist() == [positions[i] + 1 for i in last]
        assert batch.shape.uniform == (len(ids) == rows)
        for group, size in enumerate(sizes):
            attention = batch.groups[group]
            assert batch.slot_mappings[group].tolist() == slots[group] == attention.slot_mapping.tolist()
            assert attention.context_lens.tolist() == plan.num_computed_tokens.tolist()
            assert attention.seq_lens.tolist() == (plan.num_computed_tokens + plan.num_scheduled_tokens).tolist()
            assert (
                attention.max_query_len == plan.num_scheduled_tokens.max()
                and attention.max_seq_len == attention.seq_lens.max()
            )
            needed = -(-attention.max_seq_len // size)
            assert (attention.block_table == table.block_tables[group][plan.slots, :needed]).all()


def test_an_empty_plan_gives_an_empty_batch() -> None:
    table = random_table(np.random.default_rng(0), (16,))
    batcher = InputBatcher(max_num_tokens=8, block_sizes=(16,), device=torch.device("cpu"))
    batch = batcher.build(random_plan(np.random.default_rng(0), table, 0, "decode"), table)
    assert batch.num_rows == batch.num_tokens == 0 and batch.token_ids.shape == (0,)


def test_a_step_larger_than_the_buffers_is_refused() -> None:
    rng = np.random.default_rng(0)
    table = random_table(rng, (16,))
    batcher = InputBatcher(max_num_tokens=2, block_sizes=(16,), device=torch.device("cpu"))
    with pytest.raises(RuntimeError, match="buffers made for 2"):
        batcher.build(random_plan(rng, table, 5, "decode"), table)
