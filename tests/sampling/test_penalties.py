"""Masks, bias and penalties, one by one; their order is tested with the sampler."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.sampling.penalties import TokenCounts, add_bias, allow_only, forbidden_ends, mask_tokens, penalize

TOKENS = st.lists(st.integers(0, 40), max_size=120)


@given(prompt=TOKENS, chunks=st.lists(TOKENS, max_size=5), with_prompt=st.booleans(), back=st.integers(0, 30))
def test_counts_kept_token_by_token_equal_a_recount(
    prompt: list[int], chunks: list[list[int]], with_prompt: bool, back: int
) -> None:
    counts, output = TokenCounts(with_prompt=with_prompt), []
    for chunk in chunks:
        output += chunk
        counts.update(np.array(prompt + output, dtype=np.int32), len(prompt))
        output = output[: max(0, len(output) - back)]  # guesses taken back
        counts.update(np.array(prompt + output, dtype=np.int32), len(prompt))
        found = {int(i): int(c) for i, c in zip(counts.ids, counts.counts, strict=True)}
        listed = set(output) | (set(prompt) if with_prompt else set())
        assert found == {t: output.count(t) for t in listed}


@pytest.mark.parametrize("num_prompt", [0, 63, 64, 65])
def test_an_answer_may_hold_any_number_of_different_tokens(num_prompt: int) -> None:
    tokens, counts = np.arange(400, dtype=np.int32), TokenCounts(with_prompt=True)
    for length in range(num_prompt, 300):
        counts.update(tokens[:length], num_prompt)
    assert counts.ids.tolist() == list(range(299))
    assert counts.counts.tolist() == [float(i >= num_prompt) for i in range(299)]


@pytest.mark.parametrize("penalty", [1e-300, 1e-45, 1e-30, 100.0])
def test_no_repetition_penalty_makes_a_row_infinite_or_nan(penalty: float) -> None:
    x = torch.tensor([[1e9, -1e9, 0.0, -torch.inf, 1.0]])
    counts = TokenCounts(with_prompt=True)
    counts.update(np.array([0, 1, 2, 3], dtype=np.int32), 4)
    one, none = np.array([penalty], dtype=np.float32), np.zeros(1, dtype=np.float32)
    with np.errstate(all="ignore"):  # as the sampler does
        penalize(x, np.array([0]), (counts,), one, none, none)
    assert torch.isfinite(x[0, [0, 1, 2, 4]]).all()
    assert x[0, 3] == -torch.inf, "forbidden stays forbidden"


def test_penalties_follow_the_definition_and_leave_other_tokens_alone() -> None:
    x = torch.tensor([[2.0, -2.0, 1.0, 4.0, 0.5], [1.0, 1.0, 1.0, 1.0, 1.0]])
    counts = TokenCounts(with_prompt=True)
    counts.update(np.array([0, 9, 1, 1, 3], dtype=np.int32), 2)  # prompt 0 9 (9 is beyond the width), output 1 1 3
    penalize(x, np.array([0]), [counts], np.float32([2.0]), np.float32([0.5]), np.float32([0.25]))
    assert x[0].tolist() == [1.0, -4.0 - 1.0 - 0.25, 1.0, 2.0 - 0.5 - 0.25, 0.5]
    assert x[1].tolist() == [1.0] * 5


def test_masks_and_bias_touch_only_their_tokens() -> None:
    x = torch.arange(10.0).reshape(2, 5)
    allow_only(x, 0, np.array([1, 3]))
    mask_tokens(x, np.array([1, 1]), np.array([0, 4]))
    add_bias(x, np.array([0, 1]), np.array([3, 2]), np.float32([10, -1]))
    inf = float("inf")
    assert x.tolist() == [[-inf, 1.0, -inf, 13.0, -inf], [-inf, 6.0, 6.0, 8.0, -inf]]


def test_bad_words_forbid_the_last_token_of_a_sequence_that_is_about_to_complete() -> None:
    words = [(7,), (1, 2), (4, 1, 9), (5, 5, 5, 5, 5)]
    assert forbidden_ends(words, np.array([3, 4, 1], dtype=np.int32)) == [7, 2, 9]
    assert forbidden_ends(words, np.array([1, 3], dtype=np.int32)) == [7]
    assert forbidden_ends(words, np.array([], dtype=np.int32)) == [7]
    assert forbidden_ends([], np.array([1], dtype=np.int32)) == []
