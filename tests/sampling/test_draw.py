"""The counter-based generator and the inversion (OUT-4, OUT-30, SED-01, SED-03)."""

import numpy as np
import pytest
import torch

from octavo.sampling.draw import derived_seed, invert, philox, seed_word, uniforms
from tests.support import sampling_twin as twin

VECTORS = [
    ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> np.ndarray:
    return np.array([int(w, 16) for w in text.split()], dtype=np.uint64)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_matches_the_published_vectors(counter: str, key: str, expected: str) -> None:
    assert (philox(words(counter)[None], words(key)[None])[0] == words(expected)).all()


def test_philox_is_the_same_for_many_rows_as_for_each_and_as_plain_integers() -> None:
    rng = np.random.default_rng(0)
    counters = rng.integers(0, 2**32, (33, 4), dtype=np.uint64)
    keys = rng.integers(0, 2**32, (33, 2), dtype=np.uint64)
    together = philox(counters, keys)
    for i in range(33):
        assert (philox(counters[i : i + 1], keys[i : i + 1])[0] == together[i]).all()
        assert twin.philox(counters[i].tolist(), keys[i].tolist()) == together[i].tolist()


def test_uniforms_depend_on_each_part_of_the_key_and_on_nothing_else() -> None:
    def one(seed: int, index: int, position: int) -> float:
        return float(uniforms(np.array([seed], np.uint64), np.array([index]), np.array([position]))[0])

    base = one(42, 0, 7)
    assert base == one(42, 0, 7) == twin.uniform(42, 0, 7)
    others = [one(43, 0, 7), one(42, 1, 7), one(42, 0, 8), one(42 + 2**32, 0, 7), one(7, 0, 42)]
    assert len({base, *others}) == 6
    assert one(2**64 - 1, 127, 10**6) == twin.uniform(2**64 - 1, 127, 10**6)


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    n = 20000
    u = uniforms(np.full(n, 5, np.uint64), np.zeros(n, np.int64), np.arange(n))
    assert u.min() >= 0 and u.max() < 1
    observed = np.histogram(u, bins=20, range=(0, 1))[0]
    assert ((observed - n / 20) ** 2 / (n / 20)).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03


def test_negative_seeds_are_words_and_derived_seeds_follow_engine_seed_and_request() -> None:
    assert seed_word(-(2**63)) == 2**63 and seed_word(2**63 - 1) == 2**63 - 1
    assert derived_seed(0, "a") == derived_seed(0, "a")
    assert len({derived_seed(0, "a"), derived_seed(1, "a"), derived_seed(0, "b"), derived_seed(-1, "a")}) == 4
    assert 0 <= derived_seed(0, "a") < 2**64


def test_invert_never_takes_a_column_of_weight_zero() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]] * 5)
    u = torch.tensor([0.0, 0.49, 0.5, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert invert(weights, u).tolist() == [1, 1, 3, 3, 3]


def test_invert_holds_at_the_edges_of_rounding() -> None:
    tiny = torch.full((1, 1000), 1e-30)
    tiny[0, 0] = 1.0  # absorbed by the first weight even in float64
    tiny[0, 500:] = 0.0
    assert invert(tiny, torch.tensor([1 - 2**-53], dtype=torch.float64)).item() <= 499
    assert invert(torch.zeros(1, 3), torch.tensor([0.5], dtype=torch.float64)).item() == 0


def test_invert_draws_each_column_as_often_as_its_weight_says() -> None:
    weights = torch.tensor([1.0, 0.0, 2.0, 5.0, 0.5, 1.5])
    n = 20000
    u = torch.from_numpy(uniforms(np.full(n, 9, np.uint64), np.zeros(n, np.int64), np.arange(n)))
    observed = np.bincount(invert(weights.expand(n, -1), u).numpy(), minlength=6)
    expected = weights.numpy() / 10 * n
    assert observed[1] == 0
    live = expected > 0
    assert ((observed[live] - expected[live]) ** 2 / expected[live]).sum() < 18.5  # 4 degrees, p = 0.001
