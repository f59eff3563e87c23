"""`--logprobs-mode` from the option to the answer (OUT-2, step 1)."""

import math

import pytest

from octavo import LLM, SamplingParams
from octavo.config.schema import ModelConfig
from octavo.sampling.logprobs import LogprobsMode
from tests.support import checkpoints

TEMPERATURE, TOP_K = 0.5, 3
ASK = SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, seed=5, max_tokens=6, ignore_eos=True, logprobs=8)


def lines(mode: str | None) -> list[dict[int, float]]:
    """Each token's line of the same answer."""
    options = {} if mode is None else {"logprobs_mode": mode}
    with LLM(str(checkpoints.tiny_llama()), dtype="float32", num_kv_blocks=64, num_threads=1, **options) as llm:
        (answer,) = llm.generate(["A page"], ASK, use_tqdm=False)[0].outputs
    assert answer.logprobs is not None
    return [{token: entry.logprob for token, entry in line.items()} for line in answer.logprobs]


@pytest.fixture(scope="module")
def raw() -> list[dict[int, float]]:
    """What the model gave."""
    return lines(None)


def test_raw_logits_differ_from_raw_log_probabilities_by_one_number_a_line(raw: list[dict[int, float]]) -> None:
    for mine, theirs in zip(lines("raw_logits"), raw, strict=True):
        assert list(mine) == list(theirs)
        shifts = [mine[token] - theirs[token] for token in mine]
        assert max(shifts) - min(shifts) < 1e-4 and shifts[0] > 0


def test_processed_scores_are_those_the_token_was_drawn_by(raw: list[dict[int, float]]) -> None:
    for mine, theirs in zip(lines("processed_logprobs"), raw, strict=True):
        best = sorted(theirs, key=theirs.__getitem__, reverse=True)[:TOP_K]
        mass = sum(math.exp(theirs[token] / TEMPERATURE) for token in best)
        for token, value in mine.items():
            expected = theirs[token] / TEMPERATURE - math.log(mass) if token in best else -math.inf
            assert value == pytest.approx(expected, abs=1e-4)
    for mine, theirs in zip(lines("processed_logits"), lines("raw_logits"), strict=True):
        kept = {token: value for token, value in mine.items() if value > -math.inf}
        assert len(kept) == TOP_K
        assert kept == pytest.approx({token: theirs[token] / TEMPERATURE for token in kept}, abs=1e-4)


def test_the_option_offers_every_mode() -> None:
    field = next(f for f in ModelConfig.__dataclass_fields__.values() if f.name == "logprobs_mode")
    assert set(field.metadata["choices"]) == set(LogprobsMode)
