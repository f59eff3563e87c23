"""Log-probabilities against torch's own log-softmax (OUT-2 step 11, OUT-6)."""

import numpy as np
import pytest
import torch

from octavo.sampling.logprobs import score, score_prompt


@pytest.mark.parametrize("k", [0, 1, 5, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chosen_and_top_k_with_ranks(k: int, dtype: torch.dtype) -> None:
    logits = torch.randn(9, 40, generator=torch.Generator().manual_seed(k)).to(dtype)
    chosen = np.arange(9)
    ids, values, ranks = score(logits, chosen, 1 + k, 37)
    reference = torch.log_softmax(logits.double(), dim=1)
    for row in range(9):
        line = logits[row].float().tolist()
        order = sorted(range(37), key=lambda i: (-line[i], i))
        assert ids[row].tolist() == [row, *order[:k]]
        assert np.allclose(values[row], reference[row, ids[row]], atol=1e-5)
        assert ranks[row] == 1 + sum(v > line[row] for v in line[:37])


@pytest.mark.parametrize("rows", [1, 2, 7, 8])
def test_prompt_logprobs_in_chunks_equal_those_at_once_and_stay_bounded(rows: int) -> None:
    """OUT-6: the vocabulary is never held for more rows than the budget allows."""
    head = torch.randn(16, 50, generator=torch.Generator().manual_seed(2))
    hidden = torch.randn(rows, 16, generator=torch.Generator().manual_seed(3))
    seen: list[int] = []

    def logits_of(part: torch.Tensor) -> torch.Tensor:
        seen.append(part.shape[0])
        return part @ head

    targets = np.arange(rows, dtype=np.int32)
    got = score_prompt(hidden, logits_of, targets, lambda x, c: score(x, c, 4, 50), chunk_bytes=3 * 50 * 4)
    at_once = score(hidden @ head, np.arange(rows), 4, 50)
    assert (got[0] == at_once[0]).all() and (got[2] == at_once[2]).all()
    assert np.allclose(got[1], at_once[1], atol=1e-5)
    assert max(seen) <= 3 and sum(seen) == rows
