"""Log-probabilities of chosen tokens and of prompt tokens.

Promises: values are the float32 log-softmax over the whole row, or the logits themselves where the mode says so; ranks
count strictly larger logits (1 is the most likely), and equal logits are listed by rising token id.
Does not know: which tokens were possible, or who asked.
"""

from collections.abc import Callable
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.base.step import Floats, Ints, LogprobArrays
from octavo.sampling.rows import top_row
from octavo.sampling.truncation import exact_top

Scores = tuple[Ints, Floats, Ints]  # ids [N, columns], values [N, columns], ranks [N]


class LogprobsMode(StrEnum):
    """What users are shown as log-probabilities (OUT-2, step 1).

    Raw: what the model gave. Processed: what was left when the token was drawn, after masks, penalties, temperature
    and truncation; minus infinity for what could not come. Prompt tokens were not drawn: theirs are raw either way.
    """

    RAW_LOGPROBS = "raw_logprobs"
    RAW_LOGITS = "raw_logits"
    PROCESSED_LOGPROBS = "processed_logprobs"
    PROCESSED_LOGITS = "processed_logits"

    @property
    def processed(self) -> bool:
        """True when all stations come first."""
        return self in (LogprobsMode.PROCESSED_LOGPROBS, LogprobsMode.PROCESSED_LOGITS)

    @property
    def as_logits(self) -> bool:
        """True when no softmax is taken."""
        return self in (LogprobsMode.RAW_LOGITS, LogprobsMode.PROCESSED_LOGITS)

    @property
    def of_prompts(self) -> "LogprobsMode":
        """The mode for tokens that were not drawn."""
        return LogprobsMode.RAW_LOGITS if self.as_logits else LogprobsMode.RAW_LOGPROBS


CHUNK_BYTES = 64 << 20  # float32 logits of prompt tokens held at once


def score(
    logits: Tensor, chosen: npt.NDArray[np.int64], columns: int, vocab_limit: int, *, as_logits: bool = False
) -> Scores:
    """Chosen token and the `columns - 1` most likely ones of each row.

    `logits` [N, V]; `chosen` [N]. Ids from `vocab_limit` on weigh in the softmax but are not listed.
    """
    raw = logits.float()
    if raw.device.type == "cpu":
        with np.errstate(all="ignore"):  # infinities are what forbidden tokens are made of
            return _score_host(raw.numpy(), chosen, columns, vocab_limit, as_logits)
    return _score_device(raw, torch.from_numpy(chosen).to(raw.device), columns, vocab_limit, as_logits)


def _score_device(raw: Tensor, chosen: Tensor, columns: int, vocab_limit: int, as_logits: bool) -> Scores:
    """`score`, all rows together."""
    values = raw if as_logits else torch.log_softmax(raw, dim=-1)
    listed = raw[:, :vocab_limit]
    mine = raw.gather(1, chosen.unsqueeze(1))
    ranks = (listed > mine).sum(dim=1, dtype=torch.int32) + 1
    ids = chosen.unsqueeze(1)
    if columns > 1:
        ids = torch.cat((ids, exact_top(listed, columns - 1)[1]), dim=1)
    return ids.to(torch.int32).cpu().numpy(), values.gather(1, ids).cpu().numpy(), ranks.cpu().numpy()


def _score_host(raw: Floats, chosen: npt.NDArray[np.int64], columns: int, vocab_limit: int, as_logits: bool) -> Scores:
    """`score`, a row at a time."""
    ids = np.empty((len(raw), columns), dtype=np.int32)
    values = np.empty((len(raw), columns), dtype=np.float32)
    ranks = np.empty(len(raw), dtype=np.int32)
    for i, row in enumerate(raw):
        listed, mine, peak = row[:vocab_limit], row[chosen[i]], row.max()
        ids[i, 0], ranks[i] = chosen[i], 1 + np.count_nonzero(listed > mine)
        if not np.isfinite(peak):  # a damaged row: its request ends with an error, and nobody reads this
            ids[i, 1:], values[i], ranks[i] = 0, np.nan, 1
            continue
        if columns > 1:
            ids[i, 1:] = top_row(listed, columns - 1)
        values[i] = row[ids[i]]
        if not as_logits:
            values[i] = row[ids[i]] - peak - np.log(np.add.reduce(np.exp(row - peak), dtype=np.float64))
    return ids, values, ranks


def empty_lines(width: npt.NDArray[np.int32], columns: int) -> LogprobArrays:
    """Lines for every row of a batch, nothing in them yet."""
    lines = len(width)
    return LogprobArrays(
        np.zeros((lines, columns), dtype=np.int32),
        np.zeros((lines, columns), dtype=np.float32),
        np.zeros(lines, dtype=np.int32),
        width,
    )


def score_prompt(
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    targets: npt.NDArray[np.int32],
    score_chunk: Callable[[Tensor, npt.NDArray[np.int64]], Scores],
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> Scores:
    """Score `targets` [n], the prompt tokens that follow the positions of `hidden` [n, H], chunk by chunk.

    The vocabulary's logits are never held for more than `chunk_bytes` of rows (OUT-6).
    """
    chunk = 1
    parts: list[Scores] = []
    start = 0
    while start < len(targets):
        logits = logits_of(hidden[start : start + chunk])
        parts.append(score_chunk(logits, targets[start : start + chunk].astype(np.int64)))
        start += chunk
        chunk = max(1, chunk_bytes // (4 * logits.shape[1]))  # the first row told the width
    ids, values, ranks = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return ids, values, ranks
