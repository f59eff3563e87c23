"""Everything that changes single logits before the temperature: masks, bias, penalties.

Promises: each function touches only the rows it is given, at the ids that matter, in place; penalties come
before temperature, so that their size does not depend on it (OUT-3).
Does not know: slots, requests, or the order of stations (see `sampler`).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ids = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]

LARGEST = 1e38  # a logit that a small penalty divides stays finite
_BULK = 16  # from this many new tokens on, counting them with numpy is cheaper than one by one


class TokenCounts:
    """How often each token id occurs in one request's output, kept up to date token by token.

    Ids of the prompt are listed with count 0 when `with_prompt`, for the repetition penalty.
    The cost of an update is that of the new tokens, not of the text.

    Owns: the id list, the counts, and how many tokens were seen.
    """

    def __init__(self, *, with_prompt: bool) -> None:
        self._with_prompt = with_prompt
        self._reset()

    def _reset(self) -> None:
        self._index: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        self._seen: int | None = None  # tokens counted, prompt included; None before the first update

    def update(self, tokens: Tokens, num_prompt_tokens: int) -> None:
        """Count what is new in `tokens`, the request's known tokens from the first on.

        A shorter list than last time (guesses taken back) is counted anew.
        """
        if self._seen is not None and len(tokens) < self._seen:
            self._reset()
        if self._seen is None:
            if self._with_prompt:
                self._add(np.unique(tokens[:num_prompt_tokens]), 0.0)
            self._seen = num_prompt_tokens
        new = tokens[self._seen :]
        self._seen = len(tokens)
        if len(new) < _BULK:
            for token in new.tolist():
                place = self._place(token)  # first: it may put a longer array in place of this one
                self._counts[place] += 1.0
        else:
            ids, counts = np.unique(new, return_counts=True)
            self._add(ids, counts)

    def _add(self, ids: Tokens, counts: "Ids | float") -> None:
        places = np.fromiter((self._place(i) for i in ids.tolist()), dtype=np.int64, count=len(ids))
        self._counts[places] += counts

    def _place(self, token: int) -> int:
        place = self._index.get(token)
        if place is None:
            place = self._index[token] = len(self._index)
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token
        return place

    @property
    def ids(self) -> Ids:
        """Distinct ids, in no particular order."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """Occurrences in the output of each of `ids`."""
        return self._counts[: len(self._index)]


def add_bias(logits: Tensor, rows: Ids, ids: Ids, values: npt.NDArray[np.float32]) -> None:
    """Add `values` at (rows, ids); no pair occurs twice."""
    at = _indices(logits, rows, ids)
    logits[at] += torch.from_numpy(values).to(logits.device)


def mask_tokens(logits: Tensor, rows: Ids, ids: Ids) -> None:
    """Forbid the tokens at (rows, ids)."""
    logits[_indices(logits, rows, ids)] = -torch.inf


def allow_only(logits: Tensor, row: int, ids: Ids) -> None:
    """Forbid every token of `row` that is not in `ids`."""
    line = logits[row]
    at = torch.from_numpy(ids).to(logits.device)
    kept = line[at]
    line.fill_(-torch.inf)
    line[at] = kept


def forbidden_ends(bad_words: Sequence[tuple[int, ...]], tokens: Tokens) -> list[int]:
    """Last ids of those sequences whose other ids are exactly the last of `tokens` (prompt and output)."""
    longest = max((len(word) for word in bad_words), default=1) - 1
    tail = tuple(tokens[len(tokens) - min(longest, len(tokens)) :].tolist())
    return [w[-1] for w in bad_words if len(w) == 1 or (len(w) - 1 <= len(tail) and tail[-len(w) + 1 :] == w[:-1])]


def penalize(
    logits: Tensor,
    rows: Ids,
    counts: Sequence[TokenCounts],
    repetition: npt.NDArray[np.float32],
    frequency: npt.NDArray[np.float32],
    presence: npt.NDArray[np.float32],
) -> None:
    """Repetition (prompt and output), then frequency and presence (output). Arrays are one entry a row.

    Repetition as in Keskar et al. 2019 (CTRL): positive logits are divided, negative ones multiplied; no finite
    logit becomes infinite.
    Ids beyond the logits' width (a prompt may hold them) are passed over.
    """
    ids = np.concatenate([c.ids for c in counts])
    times = np.concatenate([c.counts for c in counts])
    line = np.repeat(np.arange(len(rows)), [len(c.ids) for c in counts])
    if ids.size and ids.max() >= logits.shape[1]:
        inside = ids < logits.shape[1]
        ids, times, line = ids[inside], times[inside], line[inside]
    fixed = frequency[line] * times + presence[line] * (times > 0)
    factor = np.maximum(repetition[line], np.finfo(np.float32).tiny)  # a penalty that float32 cannot tell from 0
    if logits.device.type == "cpu":  # numpy's indexing of many single elements is several times faster
        host, at = logits.numpy(), (rows[line], ids)
        values = host[at]
        host[at] = np.where(values > 0, np.minimum(values / factor, LARGEST), values * factor) - fixed
    else:
        places = _indices(logits, rows[line], ids)
        picked, factors = logits[places], torch.from_numpy(factor).to(logits.device)
        picked = torch.where(picked > 0, (picked / factors).clamp(max=LARGEST), picked * factors)
        logits[places] = picked - torch.from_numpy(fixed).to(logits.device)


def _indices(logits: Tensor, rows: Ids, ids: Ids) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(rows).to(logits.device), torch.from_numpy(ids).to(logits.device)
