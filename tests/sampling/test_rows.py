"""The one-row path against the batched one, over rows long enough for every level and block."""

import numpy as np
import pytest
import torch

from octavo.sampling import draw, rows, truncation


@pytest.mark.parametrize("vocab", [1, 5, 255, 256, 257, 6000])
@pytest.mark.parametrize("ties", [False, True])
def test_what_is_kept_and_drawn_is_the_same_as_for_batches(vocab: int, ties: bool) -> None:
    rng = np.random.default_rng(vocab)
    grid = [
        (t, k, p, m) for t in (0.2, 1.0, 30.0) for k in (0, 1, 40, 5000) for p in (0.1, 0.9, 1.0) for m in (0.0, 0.3)
    ]
    x = rng.normal(0, 3, (len(grid), vocab)).astype(np.float32)
    if ties:
        x = np.round(x)
    peaks = x.max(axis=1)
    temperatures, top_k, top_p, min_p = (np.array(column) for column in zip(*grid, strict=True))
    z = truncation.scaled(
        torch.from_numpy(x.copy()), torch.from_numpy(peaks), torch.from_numpy(temperatures.astype(np.float32))
    )
    u = rng.random(len(grid))
    for part in truncation.candidates(z.clone(), top_k.astype(np.int64), top_p, min_p):
        columns = draw.invert(part.weights, torch.from_numpy(u[part.rows]))
        for j, row in enumerate(part.rows.tolist()):
            column = int(columns[j])
            expected = column if part.ids is None else int(part.ids[j, column])
            _, k, p, m = grid[row]
            got = rows.draw_row(x[row], peaks[row], np.float32(temperatures[row]), k, p, m, float(u[row]))
            assert got == expected, grid[row]
            if part.ids is not None:
                floor = np.float32(np.log(m)) if m else np.float32(-np.inf)
                ids, weights = rows.kept(z[row].numpy(), k, p, floor)
                mine = part.weights[j] > 0
                positive = weights > 0
                assert ids[positive].tolist() == part.ids[j][mine].tolist(), grid[row]
                assert np.allclose(weights[positive], part.weights[j][mine].numpy(), rtol=1e-5)


@pytest.mark.parametrize("size", [1, 3, 256, 257, 1000])
def test_inversion_by_blocks_is_inversion(size: int) -> None:
    rng = np.random.default_rng(size)
    weights = rng.random(size).astype(np.float32)
    weights[rng.random(size) < 0.7] = 0.0
    weights[size // 2] = 1.0
    plain = np.cumsum(weights, dtype=np.float64)
    for u in (0.0, *rng.random(60), 1 - 2**-53):
        got = rows.invert_row(weights, float(u))
        assert weights[got] > 0
        assert got == min(np.searchsorted(plain, u * plain[-1], side="right"), np.searchsorted(plain, plain[-1]))


@pytest.mark.parametrize("k", [1, 2, 7, 49, 50, 60])
def test_top_ids_break_ties_by_the_lower_id(k: int) -> None:
    values = np.round(np.random.default_rng(k).normal(0, 1, 50)).astype(np.float32)
    assert rows.top_row(values, k).tolist() == sorted(range(50), key=lambda i: (-values[i], i))[:k]
    assert rows.top_row(values, k).tolist() == truncation.exact_top(torch.from_numpy(values)[None], k)[1][0].tolist()
