"""What stays after temperature, min-p, top-k and top-p, against a slow twin."""

import numpy as np
import pytest
import torch

from octavo.base.params import SamplingParams
from octavo.sampling import truncation
from tests.support import sampling_twin as twin


def full(z: torch.Tensor, parts: "list[truncation.Candidates]") -> np.ndarray:
    """Weights over the whole vocabulary; checks that each row comes exactly once."""
    out = np.zeros(z.shape, dtype=np.float64)
    rows = np.concatenate([p.rows for p in parts])
    assert sorted(rows.tolist()) == list(range(z.shape[0]))
    for part in parts:
        for j, row in enumerate(part.rows.tolist()):
            ids = np.arange(z.shape[1]) if part.ids is None else part.ids[j].numpy()
            assert (np.diff(ids) > 0).all(), "candidates run in rising id order"
            out[row, ids] = part.weights[j].numpy()
    return out


def run(x: torch.Tensor, params: list[SamplingParams]) -> np.ndarray:
    z = truncation.scaled(x.clone(), x.amax(1), torch.tensor([p.temperature for p in params]))
    parts = truncation.candidates(
        z,
        np.array([p.top_k for p in params], dtype=np.int64),
        np.array([p.top_p for p in params]),
        np.array([p.min_p for p in params]),
    )
    return full(z, list(parts))


@pytest.mark.parametrize("vocab", [1, 2, 7, 129, 300])
@pytest.mark.parametrize("ties", [False, True])
def test_kept_tokens_are_the_twins(vocab: int, ties: bool) -> None:
    rng = np.random.default_rng(vocab)
    grid = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
        for t in (0.3, 1.0, 7.0)
        for k in (0, 1, 3, 50, 1000)
        for p in (0.05, 0.5, 0.95, 1.0)
        for m in (0.0, 0.2, 1.0)
    ]
    x = torch.from_numpy(rng.normal(0, 3, (len(grid), vocab)).astype(np.float32))
    if ties:
        x = x.round()  # many equal logits, as bfloat16 gives them
    x[:, vocab // 2 + 1 :: 5] = -torch.inf
    got = run(x, grid)
    for row, params in enumerate(grid):
        expected = twin.kept(x[row].tolist(), params)
        assert np.flatnonzero(got[row]).tolist() == list(expected), params
        assert np.allclose(got[row][list(expected)], list(expected.values()), rtol=1e-5)


def test_top_p_widens_its_candidates_until_they_hold_the_mass() -> None:
    """A flat distribution needs more tokens than the first levels hold, and loses none."""
    x = torch.from_numpy(np.random.default_rng(1).normal(0, 0.1, (3, 9000)).astype(np.float32))
    x[0] *= 1000  # peaked: the first level is enough
    params = [SamplingParams(top_p=p) for p in (0.9, 0.2, 0.99)]
    got = run(x, params)
    for row, p in enumerate(params):
        expected = twin.kept(x[row].tolist(), p)
        assert np.flatnonzero(got[row]).tolist() == list(expected)
    kept = (got > 0).sum(1)
    assert kept[0] < 128 < kept[1] < 4096 < kept[2]


def test_a_large_k_in_one_row_does_not_change_the_others() -> None:
    x = torch.from_numpy(np.random.default_rng(2).normal(0, 2, (3, 3000)).astype(np.float32))
    params = [SamplingParams(top_k=k) for k in (5, 2000, 40)]
    together = run(x, params)
    for row, p in enumerate(params):
        assert (run(x[row : row + 1], [p])[0] == together[row]).all()
        assert (together[row] > 0).sum() == p.top_k


def test_exact_top_breaks_ties_by_the_lower_id() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0, 0.0], [2.0] * 6, [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    for k in range(1, 8):
        top, ids = truncation.exact_top(values, k)
        for row in range(3):
            line = values[row].tolist()
            expected = sorted(range(6), key=lambda i: (-line[i], i))[:k]
            assert ids[row].tolist() == expected and top[row].tolist() == [line[i] for i in expected]


@pytest.mark.parametrize("temperature", [1e-5, 3e-5, 1e-4, 1e-3, 100.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_no_temperature_gives_nan(temperature: float, scale: float) -> None:
    """SMP-01."""
    x = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)) * scale
    x[1, ::2] = -torch.inf
    z = truncation.scaled(x.clone(), x.amax(1), torch.full((4,), temperature))
    weights = torch.exp(z)
    assert not torch.isnan(weights).any()
    assert (weights.amax(1) == 1).all() and (weights.argmax(1) == x.argmax(1)).all()
