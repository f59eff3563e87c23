"""Log-probabilities of chosen tokens and of prompt tokens, from the model's untouched logits.

Promises: values are the float32 log-softmax over the whole row, ranks count strictly larger logits (1 is the
most likely), and equal logits are listed by rising token id.
Does not know: which tokens were possible, or who asked.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.base.step import Floats, Ints, LogprobArrays
from octavo.sampling.rows import top_row
from octavo.sampling.truncation import exact_top

CHUNK_BYTES = 64 << 20  # float32 logits of prompt tokens held at once


def score(logits: Tensor, chosen: Tensor, columns: int, vocab_limit: int) -> tuple[Ints, Floats, Ints]:
    """Chosen token and the `columns - 1` most likely ones of each row.

    `logits` [N, V] as the model gave them; `chosen` [N] int64. Ids from `vocab_limit` on weigh in the softmax
    but are not listed. Returns ids [N, columns], log-probabilities [N, columns] and ranks [N].
    """
    raw = logits.float()
    if raw.device.type == "cpu":
        with np.errstate(all="ignore"):  # a damaged row gives NaN, and its request an error elsewhere
            return _score_host(raw.numpy(), chosen.numpy(), columns, vocab_limit)
    logprobs = torch.log_softmax(raw, dim=-1)
    listed = raw[:, :vocab_limit]
    mine = raw.gather(1, chosen.unsqueeze(1))
    ranks = (listed > mine).sum(dim=1, dtype=torch.int32) + 1
    ids = chosen.unsqueeze(1)
    if columns > 1:
        ids = torch.cat((ids, exact_top(listed, columns - 1)[1]), dim=1)
    values = logprobs.gather(1, ids)
    return ids.to(torch.int32).cpu().numpy(), values.cpu().numpy(), ranks.cpu().numpy()


def _score_host(
    raw: Floats, chosen: npt.NDArray[np.int64], columns: int, vocab_limit: int
) -> tuple[Ints, Floats, Ints]:
    """`score`, a row at a time."""
    ids = np.empty((len(raw), columns), dtype=np.int32)
    values = np.empty((len(raw), columns), dtype=np.float32)
    ranks = np.empty(len(raw), dtype=np.int32)
    for i, row in enumerate(raw):
        listed, mine, peak = row[:vocab_limit], row[chosen[i]], row.max()
        ids[i, 0] = chosen[i]
        if columns > 1:
            ids[i, 1:] = top_row(listed, columns - 1)
        ranks[i] = 1 + np.count_nonzero(listed > mine)
        values[i] = row[ids[i]] - peak - np.log(np.add.reduce(np.exp(row - peak), dtype=np.float64))
    return ids, values, ranks


def score_rows(
    logits: Tensor, rows: npt.NDArray[np.int64], chosen: Tensor, width: npt.NDArray[np.int32], vocab_limit: int
) -> LogprobArrays:
    """Lines for every row of a batch, of which only `rows` asked.

    `logits` [len(rows), V] are those rows' own; `chosen` [N] and `width` [N] are the whole batch's.
    """
    columns = int(width.max())
    lines = len(width)
    ids = np.zeros((lines, columns), dtype=np.int32)
    values = np.zeros((lines, columns), dtype=np.float32)
    ranks = np.zeros(lines, dtype=np.int32)
    picked = chosen[torch.from_numpy(rows).to(chosen.device)]
    ids[rows], values[rows], ranks[rows] = score(logits, picked, columns, vocab_limit)
    return LogprobArrays(ids, values, ranks, width.astype(np.int32))


def score_prompt(
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    targets: npt.NDArray[np.int32],
    columns: int,
    vocab_limit: int,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Ints, Floats, Ints]:
    """Score `targets` [n], the prompt tokens that follow the positions of `hidden` [n, H], chunk by chunk.

    The vocabulary's logits are never held for more than `chunk_bytes` of rows (OUT-6).
    """
    chunk = 1
    parts: list[tuple[Ints, Floats, Ints]] = []
    start = 0
    while start < len(targets):
        logits = logits_of(hidden[start : start + chunk])
        chosen = torch.from_numpy(targets[start : start + chunk].astype(np.int64)).to(logits.device)
        parts.append(score(logits, chosen, columns, vocab_limit))
        start += chunk
        chunk = max(1, chunk_bytes // (4 * logits.shape[1]))  # the first row told the width
    ids, values, ranks = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return ids, values, ranks
