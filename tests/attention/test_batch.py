"""Lengths, offsets and slots of a step (ATT-4, EXE-15)."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.attention.batch import AttentionBatch


@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=8),
    block_size=st.sampled_from([1, 3, 16, 64]),
    padding=st.integers(0, 5),
)
def test_slots_equal_a_plain_loop(rows, block_size, padding):
    contexts, queries = [c for c, _ in rows], [q for _, q in rows]
    width = max(-(-(c + q) // block_size) for c, q in rows)
    table = np.arange(1, 1 + width * len(rows), dtype=np.int32).reshape(len(rows), width)[:, ::-1].copy()
    want = [
        int(table[r, p // block_size]) * block_size + p % block_size
        for r, (c, q) in enumerate(rows)
        for p in range(c, c + q)
    ]
    batch = AttentionBatch.of(
        query_lens=queries,
        context_lens=contexts,
        block_table=table,
        block_size=block_size,
        padded_tokens=len(want) + padding,
    )
    assert batch.slot_mapping.tolist() == want + [-1] * padding
    assert batch.query_starts.tolist() == [sum(queries[:i]) for i in range(len(rows) + 1)]
    assert batch.seq_lens.tolist() == [c + q for c, q in rows]
    assert (batch.num_rows, batch.num_tokens) == (len(rows), len(want))
    assert (batch.max_query_len, batch.max_seq_len) == (max(queries), int(batch.seq_lens.max()))


def test_the_slot_tensor_is_a_view_on_the_cpu():
    batch = AttentionBatch.of(query_lens=[2], context_lens=[0], block_table=np.array([[4]], np.int32), block_size=8)
    tensor = batch.slot_mapping_tensor()
    assert tensor.dtype == torch.int64 and tensor.tolist() == [32, 33]
    assert tensor.data_ptr() == batch.slot_mapping.ctypes.data


def test_an_empty_step():
    batch = AttentionBatch.of(query_lens=[], context_lens=[], block_table=np.zeros((0, 1), np.int32), block_size=8)
    assert (batch.num_rows, batch.num_tokens, batch.max_seq_len) == (0, 0, 0) and len(batch.slot_mapping) == 0
