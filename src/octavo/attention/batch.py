"""What every backend's plan starts from: lengths, block tables and slots of one step's rows.

Promises: numpy on the host side, where planning is done; made once a step and group, shared by all builders (ATT-4).
Does not know: backends, or where the numbers come from (see `worker.batch`).

Words (ATT-4): a row's *context* is what the cache holds, its *query* what is new, its *sequence* their sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """Rows of one step, of one KV group. Arrays are read-only by convention; rows are in batch order.

    Entries of `block_table` beyond a row's sequence, and those a window has left behind, may be anything valid
    (the null block 0 as a rule): nobody reads what they point at.
    """

    query_starts: Ints  # [R + 1], row r's tokens are query_starts[r] .. query_starts[r + 1] - 1
    query_lens: Ints  # [R], at least 1
    context_lens: Ints  # [R]
    seq_lens: Ints  # [R]
    block_table: Ints  # [R, max blocks]
    slot_mapping: Longs  # [T], padding included as -1
    num_tokens: int  # without padding
    max_query_len: int
    max_seq_len: int

    @classmethod
    def of(
        cls,
        *,
        query_lens: "Sequence[int] | Ints",
        context_lens: "Sequence[int] | Ints",
        block_table: Ints,
        block_size: int,
        padded_tokens: int | None = None,
    ) -> "AttentionBatch":
        """Derive offsets and slots. `padded_tokens` is T; the number of tokens when it is not given."""
        queries = np.asarray(query_lens, dtype=np.int32)
        contexts = np.asarray(context_lens, dtype=np.int32)
        starts = np.zeros(len(queries) + 1, dtype=np.int32)
        np.cumsum(queries, out=starts[1:])
        num_tokens = int(starts[-1])
        seqs = contexts + queries
        return cls(
            query_starts=starts,
            query_lens=queries,
            context_lens=contexts,
            seq_lens=seqs,
            block_table=block_table,
            slot_mapping=make_slot_mapping(starts, contexts, block_table, block_size, padded_tokens or num_tokens),
            num_tokens=num_tokens,
            max_query_len=int(queries.max(initial=0)),
            max_seq_len=int(seqs.max(initial=0)),
        )

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.query_lens)

    def slot_mapping_tensor(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """The slots as a tensor [T] int64; on the CPU a view of the array."""
        return torch.from_numpy(self.slot_mapping).to(device)


def make_slot_mapping(
    query_starts: Ints, context_lens: Ints, block_table: Ints, block_size: int, padded_tokens: int
) -> Longs:
    """Each new token's slot, `block * block_size + offset`; -1 from the last token to `padded_tokens` (EXE-15)."""
    num_tokens = int(query_starts[-1])
    slot_mapping = np.full(padded_tokens, -1, dtype=np.int64)
    rows = np.repeat(np.arange(len(context_lens)), np.diff(query_starts))
    positions = np.arange(num_tokens) - query_starts[rows] + context_lens[rows]
    slot_mapping[:num_tokens] = block_table[rows, positions // block_size].astype(np.int64) * block_size
    slot_mapping[:num_tokens] += positions % block_size
    return slot_mapping
