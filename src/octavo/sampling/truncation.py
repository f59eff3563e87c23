"""Temperature, min-p, top-k and top-p: which tokens stay, and with which weight.

Promises: what a row keeps depends on that row alone; ties fall to the lower token id, so 'k tokens' are k;
no temperature above zero gives NaN, since the row's maximum is subtracted before dividing (SMP-01).
Does not know: penalties, masks, or how a token is drawn from the weights.

Definitions, for scaled logits z (the row's maximum is 0) and weights w = exp(z):
min-p keeps w >= min_p; top-k keeps the first k by (weight falling, id rising); top-p then keeps, in the same
order, each token before which less than p of the remaining weight has gone. At least one token stays.
The whole vocabulary is sorted only when a bounded set of candidates does not hold p of the weight.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NARROW = 1024  # rows with a larger k are handled alone, so that they do not widen the others
WHOLE_ROWS_BYTES = 16 << 20  # of float64 sums over whole rows held at once
LEVELS = (128, 4096)  # candidates tried for top-p before the whole vocabulary

Floats64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Some rows' tokens in rising id order and their weights; weight 0 means 'not kept'.

    `rows` [n] are indices into the batch; `ids` [n, K] is None when column and token id are the same.
    """

    rows: npt.NDArray[np.int64]
    ids: Tensor | None
    weights: Tensor


def scaled(logits: Tensor, peaks: Tensor, temperatures: Tensor) -> Tensor:
    """(logits - peak) / temperature in float32, in place. `logits` [N, V]; the others [N].

    Differences are divided, never the logits themselves: those overflow at tiny temperatures.
    """
    return logits.sub_(peaks.unsqueeze(1)).div_(temperatures.unsqueeze(1))


def exact_top(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, sorted by (value falling, index rising): values and indices [N, k].

    `torch.topk` leaves open which of several equal values it takes at the border; bfloat16 logits are full
    of them. Rows where the border cuts through equal values are therefore mended.
    """
    width = values.shape[1]
    if k >= width:
        top, ids = torch.sort(values, dim=1, descending=True, stable=True)
        return top, ids
    top, ids = torch.topk(values, k + 1, dim=1)
    tied = top[:, k - 1] == top[:, k]
    top, ids = top[:, :k], ids[:, :k]
    if bool(tied.any()):
        ids = _mend_ties(values, top, ids, tied)
    ids = torch.sort(ids, dim=1).values
    top, order = torch.sort(values.gather(1, ids), dim=1, descending=True, stable=True)
    return top, ids.gather(1, order)


def _mend_ties(values: Tensor, top: Tensor, ids: Tensor, tied: Tensor) -> Tensor:
    """In tied rows, replace the ids at the border value by the lowest ids that have it."""
    rows = tied.nonzero().squeeze(1)
    border = top[rows, -1:]
    at_border = top[rows] == border
    equal = values[rows] == border
    chosen = equal & (torch.cumsum(equal, dim=1, dtype=torch.int32) <= at_border.sum(1, keepdim=True))
    mended = ids[rows]
    mended[at_border] = chosen.nonzero()[:, 1]  # both run row by row with the same number a row
    ids = ids.clone()
    ids[rows] = mended
    return ids


def candidates(z: Tensor, top_k: npt.NDArray[np.int64], top_p: Floats64, min_p: Floats64) -> Iterator[Candidates]:
    """Split the rows by what they need and give each row's kept tokens once.

    `z` [N, V] are scaled logits and may be overwritten; `top_k` 0 means all; `top_p` 1 and `min_p` 0 mean off.
    """
    if (rows := np.flatnonzero(min_p > 0)).size:
        _drop_below(z, rows, min_p[rows])
    limited = (top_k > 0) & (top_k < z.shape[1])
    nucleus = ~limited & (top_p < 1.0)
    whole = np.flatnonzero(~limited & ~nucleus)
    step = max(1, WHOLE_ROWS_BYTES // (8 * z.shape[1]))
    for rows in (whole[i : i + step] for i in range(0, len(whole), step)):
        yield Candidates(rows, None, torch.exp(_take(z, rows)))
    if (rows := np.flatnonzero(limited & (top_k <= NARROW))).size:
        yield _top_k(z, rows, top_k[rows], top_p[rows])
    for row in np.flatnonzero(limited & (top_k > NARROW)):
        only = np.asarray([row], dtype=np.int64)
        yield _top_k(z, only, top_k[only], top_p[only])
    if (rows := np.flatnonzero(nucleus)).size:
        yield from _top_p(z, rows, top_p[rows])


def _take(z: Tensor, rows: npt.NDArray[np.int64]) -> Tensor:
    if len(rows) == z.shape[0]:
        return z
    return z.index_select(0, torch.from_numpy(rows).to(z.device))


def _drop_below(z: Tensor, rows: npt.NDArray[np.int64], min_p: Floats64) -> None:
    """min-p: the largest weight is exp(0), so a token stays when z >= log(min_p)."""
    floor = np.full(z.shape[0], -np.inf, dtype=np.float32)
    floor[rows] = np.log(min_p)
    z.masked_fill_(z < torch.from_numpy(floor).to(z.device).unsqueeze(1), -torch.inf)


def _top_k(z: Tensor, rows: npt.NDArray[np.int64], k: npt.NDArray[np.int64], p: Floats64) -> Candidates:
    widest = int(k.max())
    values, ids = exact_top(_take(z, rows), widest)
    weights = torch.exp(values)
    columns = torch.arange(widest, device=z.device)
    weights = weights.masked_fill(columns >= torch.from_numpy(k).to(z.device).unsqueeze(1), 0.0)
    if bool((p < 1.0).any()):
        cumulative = torch.cumsum(weights, dim=1, dtype=torch.float64)
        weights = _keep_nucleus(weights, cumulative, cumulative[:, -1:], p)
    return _by_id(rows, ids, weights)


def _top_p(z: Tensor, rows: npt.NDArray[np.int64], p: Floats64) -> Iterator[Candidates]:
    """Widen the candidates until they hold p of the weight; each row leaves at the first level that does."""
    mine = _take(z, rows)
    totals = _row_sums(torch.exp(mine))
    for width in (*LEVELS, z.shape[1]):
        width = min(width, z.shape[1])
        values, ids = exact_top(mine, width)
        weights = torch.exp(values)
        cumulative = torch.cumsum(weights, dim=1, dtype=torch.float64)
        bound = torch.from_numpy(p).to(z.device).unsqueeze(1) * totals
        done = (cumulative[:, -1:] >= bound).squeeze(1).cpu().numpy() | (width == z.shape[1])
        kept = _keep_nucleus(weights, cumulative, totals, p)
        if (ready := np.flatnonzero(done)).size:
            yield _by_id(rows[ready], _take(ids, ready), _take(kept, ready))
        rest = np.flatnonzero(~done)
        if not rest.size:
            return
        rows, p, mine, totals = rows[rest], p[rest], _take(mine, rest), _take(totals, rest)


def _keep_nucleus(weights: Tensor, cumulative: Tensor, totals: Tensor, p: Floats64) -> Tensor:
    """Zero the weights before which p of `totals` [n, 1] has already gone; `weights` [n, K] fall."""
    share = torch.from_numpy(np.where(p < 1.0, p, np.inf)).to(weights.device).unsqueeze(1)
    before = torch.zeros_like(cumulative)
    before[:, 1:] = cumulative[:, :-1]
    return weights.masked_fill(before >= share * totals, 0.0)


def _row_sums(weights: Tensor) -> Tensor:
    """Float64 sums [n, 1] whose order of addition does not depend on the number of rows."""
    if weights.device.type == "cpu":  # torch splits one long row over threads, but not many short ones
        return torch.from_numpy(np.add.reduce(weights.numpy(), axis=1, dtype=np.float64, keepdims=True))
    return weights.sum(1, keepdim=True, dtype=torch.float64)


def _by_id(rows: npt.NDArray[np.int64], ids: Tensor, weights: Tensor) -> Candidates:
    ids, order = torch.sort(ids, dim=1)
    return Candidates(rows, ids, weights.gather(1, order))
