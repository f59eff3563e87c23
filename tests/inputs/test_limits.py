"""What does not fit the model is refused with the field, the value and the range (INP-20)."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import ClientError, ContextLengthError
from octavo.base.params import SamplingParams
from octavo.inputs.limits import RequestLimits
from octavo.inputs.renderer import EngineInput
from octavo.inputs.tokenizer_fast import FastTokenizer, SpecialTokens
from tests.inputs.builders import byte_bpe

TOKENIZER = FastTokenizer(byte_bpe(), SpecialTokens())
LIMITS = RequestLimits(max_model_len=128, vocab_size=702, tokenizer=TOKENIZER)


def check(
    num_prompt: int = 5, *, limits: RequestLimits = LIMITS, default: bool = False, **params: Any
) -> SamplingParams:
    prompt = EngineInput(tuple(range(num_prompt)))
    return limits.check(prompt, SamplingParams(**params), max_tokens_is_default=default)


class TestLength:
    """API-01."""

    @pytest.mark.parametrize("num_prompt", [129, 500, 100_000])
    def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(self, num_prompt: int) -> None:
        with pytest.raises(
            ContextLengthError, match=rf"prompt has {num_prompt} tokens.*context length of 128"
        ) as caught:
            check(num_prompt, max_tokens=1)
        assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"

    def test_a_prompt_that_leaves_no_room_is_told_so(self) -> None:
        with pytest.raises(ContextLengthError, match=r"prompt has 128 tokens.*128: no room is left for one token"):
            check(128, max_tokens=1)

    def test_the_longest_prompt_with_one_token_is_served(self) -> None:
        assert check(127, max_tokens=1).max_tokens == 1

    def test_an_answer_that_does_not_fit_is_refused_with_all_numbers(self) -> None:
        with pytest.raises(
            ContextLengthError, match=r"length is 128.*150 were asked for: 50.*100.*at most 78"
        ) as caught:
            check(50, max_tokens=100)
        assert caught.value.param == "max_tokens"

    def test_no_number_means_what_the_context_leaves(self) -> None:
        assert check(50, max_tokens=None).max_tokens == 78
        assert check(127, max_tokens=None, n=3).max_tokens == 1

    def test_a_doors_own_default_is_lowered_and_a_clients_number_is_not(self) -> None:
        assert check(120, max_tokens=16, default=True).max_tokens == 8
        assert check(10, max_tokens=16, default=True).max_tokens == 16
        with pytest.raises(ContextLengthError):
            check(120, max_tokens=16)

    def test_min_tokens_must_fit_too(self) -> None:
        with pytest.raises(ContextLengthError, match=r"min_tokens is 20.*leaves 8") as caught:
            check(120, max_tokens=None, min_tokens=20)
        assert caught.value.param == "min_tokens"

    def test_an_empty_prompt_is_refused(self) -> None:
        with pytest.raises(ClientError, match="prompt is empty") as caught:
            check(0)
        assert caught.value.param == "prompt"

    def test_scoring_a_prompt_needs_no_answer(self) -> None:
        assert check(100, max_tokens=0, prompt_logprobs=1).max_tokens == 0

    @given(st.integers(1, 200), st.none() | st.integers(1, 300), st.booleans())
    def test_whatever_is_accepted_fits(self, num_prompt: int, max_tokens: int | None, default: bool) -> None:
        try:
            out = check(num_prompt, max_tokens=max_tokens, default=default)
        except ContextLengthError:
            assert num_prompt >= 128 or (max_tokens is not None and num_prompt + max_tokens > 128 and not default)
            return
        assert out.max_tokens is not None and out.max_tokens >= 1 and num_prompt + out.max_tokens <= 128


class TestVocabulary:
    """API-05, STP-05, SMP-02."""

    @pytest.mark.parametrize("wrong", [702, -1, 2**31, 2**32 + 5, 2**63, -(2**63)])
    @pytest.mark.parametrize("field", ["prompt", "stop_token_ids", "allowed_token_ids", "logit_bias"])
    def test_ids_outside_the_vocabulary_are_named_with_the_range(self, field: str, wrong: int) -> None:
        prompt: tuple[int, ...] = (1, 2)
        params: dict[str, Any] = {}
        if field == "prompt":
            prompt = (1, wrong)
        elif field == "logit_bias":
            params = {field: {5: 1.0, wrong: -100}}
        else:
            params = {field: [5, wrong]}
        with pytest.raises(ClientError, match=rf"{field}.*{wrong}.*0 to 701") as caught:
            LIMITS.check(EngineInput(prompt), SamplingParams(**params))
        assert caught.value.param == field

    def test_every_id_of_the_vocabulary_is_taken(self) -> None:
        params = SamplingParams(stop_token_ids=(0, 701), allowed_token_ids=(0, 701), logit_bias={0: -100, 701: 100})
        assert LIMITS.check(EngineInput((0, 701)), params) == params

    @pytest.mark.parametrize("key", ["abc", "1.5", True, None])
    def test_bias_keys_must_be_ids(self, key: Any) -> None:
        with pytest.raises(ClientError) as caught:
            SamplingParams(logit_bias={key: 1})
        assert caught.value.param == "logit_bias"


class TestLogprobs:
    @pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
    def test_the_cap_is_named(self, field: str) -> None:
        assert getattr(check(**{field: 20}), field) == 20
        for asked, told in ((21, "21"), (-1, "the whole vocabulary")):
            with pytest.raises(ClientError, match=rf"{field} must be at most 20 here, got {told}") as caught:
                check(**{field: asked})
            assert caught.value.param == field

    def test_the_cap_can_be_set_or_lifted(self) -> None:
        few = RequestLimits(max_model_len=128, vocab_size=702, tokenizer=TOKENIZER, max_logprobs=2)
        with pytest.raises(ClientError, match="at most 2"):
            check(limits=few, logprobs=3)
        free = RequestLimits(max_model_len=128, vocab_size=702, tokenizer=TOKENIZER, max_logprobs=-1)
        assert check(limits=free, logprobs=-1, prompt_logprobs=500).logprobs == -1


class TestStrings:
    @pytest.mark.parametrize("field", ["stop", "bad_words"])
    def test_half_a_surrogate_pair_is_refused(self, field: str) -> None:
        with pytest.raises(ClientError, match=rf"{field}\[1\].*surrogate") as caught:
            check(**{field: ["ok", "a\ud83d"]})
        assert caught.value.param == field

    def test_bad_words_become_ids_alone_and_after_a_space(self) -> None:
        ids = LIMITS.bad_words_ids(SamplingParams(bad_words=("the", " the", "Paris")))
        expected = [tuple(TOKENIZER.encode(w, add_special_tokens=False)) for w in ("the", " the", "Paris", " Paris")]
        assert list(ids) == expected
        assert LIMITS.bad_words_ids(SamplingParams()) == ()

    @pytest.mark.parametrize("word", [" ", "  ", "\n", " \n"])
    def test_a_bad_word_of_spaces_is_a_word(self, word: str) -> None:
        """F12's kind: it was dropped in silence."""
        assert tuple(TOKENIZER.encode(word, add_special_tokens=False)) in LIMITS.bad_words_ids(
            SamplingParams(bad_words=(word,))
        )

    def test_bad_words_without_a_tokenizer_are_refused(self) -> None:
        with pytest.raises(ClientError, match="needs a tokenizer"):
            RequestLimits(max_model_len=8, vocab_size=10).bad_words_ids(SamplingParams(bad_words=("x",)))
