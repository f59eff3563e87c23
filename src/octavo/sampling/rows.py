"""Truncation, draw and top-k of one row at a time, for logits that lie in a CPU's memory.

Promises: the same tokens as `truncation` and `draw.invert` give, several times faster: a row stays in the cache,
values are sorted without their ids, and only those near the row's maximum are looked at where that is enough.
Does not know: batches, parameters by slot, or torch.
"""

from math import inf, log

import numpy as np
import numpy.typing as npt

Floats32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

LEVELS = (-4.0, -10.0)  # scaled logits below these are left out first; the weight at -10 is 1/22026 of the largest
BLOCK = 256  # weights whose sum is taken before single ones are looked at


def draw_row(
    logits: Floats32, peak: np.float32, temperature: np.float32, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """The token id of one draw from `logits` [V], of which `peak` is the largest."""
    z = logits - peak
    z /= temperature
    floor = np.float32(log(min_p)) if min_p > 0 else np.float32(-inf)
    if 0 < top_k < len(z) or top_p < 1.0:
        ids, weights = kept(z, top_k, top_p, floor)
        return int(ids[invert_row(weights, uniform)])
    weights = np.exp(z)
    if min_p > 0:
        weights[z < floor] = 0.0
    return invert_row(weights, uniform)


def kept(z: Floats32, top_k: int, top_p: float, floor: np.float32) -> tuple[Ids, Floats32]:
    """Ids, rising, and weights of what min-p (as the least `z`), top-k and top-p leave of scaled logits [V]."""
    limited = 0 < top_k < len(z)
    total = 0.0 if limited else _weight(z if floor == -inf else z[z >= floor])
    for level in (*(np.float32(c) for c in LEVELS if c > floor), floor):
        near = z >= level
        if limited and level > floor and np.count_nonzero(near) < top_k:
            continue  # counting is much cheaper than listing
        ids = np.flatnonzero(near)
        values = z[ids]
        if limited or _weight(values) >= top_p * total:
            break
    count = min(top_k, len(values)) if limited else len(values)
    largest = values if count == len(values) else np.partition(values, len(values) - count)[-count:]
    falling = np.sort(largest)[::-1]
    if top_p < 1.0:
        sums = np.cumsum(np.exp(falling[:count]), dtype=np.float64)
        bound = top_p * (float(sums[-1]) if limited else total)
        count = 1 + int(np.searchsorted(sums[: count - 1], bound))  # each has less than `bound` before it
    border = falling[count - 1]
    keep = values > border
    keep[np.flatnonzero(values == border)[: count - int(np.count_nonzero(keep))]] = True
    return ids[keep], np.exp(values[keep])


def possible_row(z: Floats32, top_k: int, top_p: float, min_p: float) -> Floats32:
    """Scaled logits [V] with minus infinity for what min-p, top-k and top-p leave out."""
    floor = np.float32(log(min_p)) if min_p > 0 else np.float32(-inf)
    ids = kept(z, top_k, top_p, floor)[0] if 0 < top_k < len(z) or top_p < 1.0 else np.flatnonzero(z >= floor)
    out = np.full_like(z, -np.inf)
    out[ids] = z[ids]
    return out


def invert_row(weights: Floats32, uniform: float) -> int:
    """The index at which the cumulative weight first exceeds `uniform` times the total; never one of weight 0."""
    starts = np.arange(0, len(weights), BLOCK)
    sums = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = uniform * float(sums[-1])
    block = min(_after(sums, target), int(np.searchsorted(sums, sums[-1])))
    before = float(sums[block - 1]) if block else 0.0
    inside = np.cumsum(weights[block * BLOCK : (block + 1) * BLOCK], dtype=np.float64)
    index = min(_after(inside, target - before), int(np.searchsorted(inside, inside[-1])))
    return block * BLOCK + index


def top_row(values: Floats32, k: int) -> Ids:
    """Ids of the k largest of [V], by (value falling, id rising)."""
    if k < len(values):
        border = np.partition(values, len(values) - k)[len(values) - k]
        ids = np.flatnonzero(values >= border)
    else:
        ids = np.arange(len(values))
    return ids[np.argsort(-values[ids], kind="stable")[:k]]


def _weight(z: Floats32) -> float:
    return float(np.add.reduce(np.exp(z), dtype=np.float64))


def _after(sums: npt.NDArray[np.float64], target: float) -> int:
    return int(np.searchsorted(sums, target, side="right"))
