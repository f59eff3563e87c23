"""Parameters that exist are valid; what is not says which field, and what it may be (INP-20)."""

import math

import numpy as np
import pytest

from octavo.base.errors import ClientError
from octavo.base.params import SamplingParams, shown


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 129), ("n", True), ("n", 1.5), ("temperature", -0.1), ("temperature", math.nan),
        ("temperature", math.inf), ("temperature", "hot"), ("temperature", True), ("top_p", -0.1), ("top_p", 1.01),
        ("top_k", -2), ("top_k", 2.5), ("min_p", -0.1), ("min_p", 1.1), ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1), ("repetition_penalty", 0.0), ("seed", 2**63), ("seed", "x"), ("max_tokens", 0),
        ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", 1e300), ("seed", math.inf), ("min_tokens", -1), ("stop", [""]), ("stop", [3]), ("stop", {}),
        ("stop_token_ids", ["a"]), ("stop_token_ids", [True]), ("stop_token_ids", 5), ("logprobs", -2),
        ("prompt_logprobs", "1"), ("logit_bias", [1]), ("logit_bias", {"abc": 1}), ("logit_bias", {"1": 101}),
        ("logit_bias", {1: math.nan}), ("logit_bias", {True: 1}), ("allowed_token_ids", []),
        ("allowed_token_ids", [1.5]), ("bad_words", [""]), ("bad_words", "word"), ("max_tokens", 10**5000),
        ("temperature", 10**400), ("temperature", None), ("logit_bias", {1.5: 1}), ("logit_bias", {math.inf: 1}),
        ("logit_bias", {1: 10**5000}), ("stop", b"ab"), ("stop_token_ids", {1}), ("ignore_eos", "yes"),
        ("detokenize", 1), ("skip_special_tokens", None), ("output_kind", "delta"), ("seed", 10**5000),
    ],
    ids=lambda value: shown(value)[:20],
)  # fmt: skip
def test_a_wrong_value_names_its_field(field, value):
    with pytest.raises(ClientError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in caught.value.message


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(
        max_tokens=np.int64(4), seed=np.uint8(3), temperature=np.float32(0.5), stop_token_ids=np.array([5, 6]),
        allowed_token_ids=[np.int32(7)], logit_bias={np.int64(8): np.float32(1)}, logprobs=np.int16(2),
    )  # fmt: skip
    assert (params.max_tokens, params.seed, params.temperature, params.stop_token_ids) == (4, 3, 0.5, (5, 6))
    assert (params.allowed_token_ids, params.logit_bias, params.logprobs) == ((7,), {8: 1.0}, 2)
    kinds = (params.max_tokens, params.seed, params.temperature, *params.stop_token_ids, *params.allowed_token_ids)
    assert {type(value) for value in kinds} == {int, float}


def test_whole_numbers_are_integers():
    """F91: JSON has one kind of number, so 2.0 is 2 in every field that takes an integer."""
    params = SamplingParams(
        n=2.0, top_k=5.0, seed=7.0, max_tokens=np.float32(3), min_tokens=1.0, logprobs=0.0, prompt_logprobs=2.0,
        stop_token_ids=[1.0, 2], allowed_token_ids=(3.0,), logit_bias={4.0: 1},
    )  # fmt: skip
    same = SamplingParams(
        n=2, top_k=5, seed=7, max_tokens=3, min_tokens=1, logprobs=0, prompt_logprobs=2, stop_token_ids=[1, 2],
        allowed_token_ids=(3,), logit_bias={4: 1},
    )  # fmt: skip
    assert params == same
    assert {type(getattr(params, name)) for name in ("n", "top_k", "seed", "max_tokens", "logprobs")} == {int}
    assert {type(i) for i in (*params.stop_token_ids, *params.allowed_token_ids, *params.logit_bias)} == {int}


def test_top_p_zero_takes_the_most_probable_token():
    """F19, with the neighbours that mean 'all tokens' or 'the best one' and must stay allowed."""
    assert SamplingParams(top_p=0).greedy and SamplingParams(top_p=0.0, temperature=0).greedy
    assert not SamplingParams(top_p=0.01).greedy
    for fields in ({"top_k": 0}, {"top_k": -1}, {"min_p": 0}, {"min_p": 1}, {"temperature": 0}, {"top_p": 1}):
        assert SamplingParams(**fields)
    assert SamplingParams(top_k=-1).top_k == 0


def test_stop_strings_need_a_text():
    with pytest.raises(ClientError, match="stop needs detokenize"):
        SamplingParams(stop="a", detokenize=False)


def test_min_tokens_may_not_exceed_max_tokens():
    with pytest.raises(ClientError, match=r"min_tokens \(9\) must not exceed max_tokens \(8\)"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_zero_tokens_are_allowed_for_scoring_a_prompt():
    assert SamplingParams(max_tokens=0, prompt_logprobs=1).max_tokens == 0


def test_several_greedy_samples_are_allowed_and_will_be_equal():
    assert SamplingParams(n=2, temperature=0).greedy


def test_handy_spellings_are_normalized_once():
    params = SamplingParams(stop="x", top_k=-1, seed=-1, stop_token_ids=[1], logit_bias={"7": 1}, bad_words=["a"])
    assert (params.stop, params.top_k, params.seed) == (("x",), 0, None)
    assert (params.stop_token_ids, params.logit_bias, params.bad_words) == ((1,), {7: 1.0}, ("a",))
    assert SamplingParams(stop=None).stop == ()


def test_a_copy_is_checked_again():
    params = SamplingParams(temperature=0.5)
    assert params.replace(max_tokens=3).max_tokens == 3
    with pytest.raises(ClientError):
        params.replace(top_p=7.0)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9e-6, True), (1e-5, False), (1.0, False)])
def test_greedy_is_below_a_hundred_thousandth(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy
