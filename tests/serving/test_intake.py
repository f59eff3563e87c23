"""From input to engine requests (REQ-5, OUT-7)."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from octavo.base.errors import ClientError
from octavo.base.params import SamplingParams
from octavo.base.types import OutputKind
from octavo.serving.intake import Intake, RequestIds
from tests.support.toy_front import MAX_LEN, info, limits, prompt


def intake(prefix: str = "") -> Intake:
    return Intake(limits(), info(), RequestIds(prefix), lambda: 12.5)


def test_ids_are_never_the_client_s_and_never_come_again() -> None:
    one = intake("p-")
    got = [one.prepare(prompt("hi"), SamplingParams(), {"client_id": "dup"}).requests[0] for _ in range(3)]
    assert [r.request_id for r in got] == ["p-0", "p-1", "p-2"]
    assert {r.client_id for r in got} == {"dup"}


def test_ids_are_unique_across_threads() -> None:
    ids = RequestIds("")
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda _: [ids.next() for _ in range(500)], range(8)))
    assert len({i for part in got for i in part}) == 4000


def test_samples_are_siblings_with_one_seed_sed_03() -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=None, prompt_logprobs=1)
    prepared = intake().prepare(prompt("hi"), params, {"priority": 2, "cache_salt": "s"})
    requests = prepared.requests
    assert [r.request_id for r in requests] == ["0.0", "0.1", "0.2"] == list(prepared.opening.request_ids)
    assert [r.sample_index for r in requests] == [0, 1, 2]
    assert {(r.parent_id, r.sampling.seed, r.sampling.n, r.priority, r.cache_salt, r.arrival_s) for r in requests} == {
        ("0", 7, 1, 2, "s", 12.5)
    }
    assert [r.sampling.prompt_logprobs for r in requests] == [1, None, None]  # the prompt is scored once
    assert prepared.opening.params.n == 3
    assert all(r.sampling.max_tokens == MAX_LEN - len(requests[0].prompt_token_ids) for r in requests)


def test_a_single_answer_has_no_parent() -> None:
    (request,) = intake().prepare(prompt("hi"), SamplingParams(), {}).requests
    assert (request.request_id, request.parent_id, request.eos_token_ids) == ("0", None, (1,))


def test_scoring_only_keeps_every_sample_valid() -> None:
    params = SamplingParams(n=2, max_tokens=0, prompt_logprobs=0)
    assert [r.sampling.max_tokens for r in intake().prepare(prompt("hi"), params, {}).requests] == [0, 0]


def test_bad_words_travel_as_ids_and_the_kind_can_be_forced() -> None:
    params = SamplingParams(bad_words=["the"])
    prepared = intake().prepare(prompt("hi"), params, {}, kind=OutputKind.FINAL_ONLY)
    assert prepared.requests[0].bad_words_ids == limits().bad_words_ids(params)
    assert prepared.opening.params.output_kind is OutputKind.FINAL_ONLY


def test_what_the_model_cannot_serve_is_refused() -> None:
    with pytest.raises(ClientError, match="context"):
        intake().prepare(prompt("hi"), SamplingParams(max_tokens=MAX_LEN), {})


@pytest.mark.parametrize(
    ("fields", "ok"),
    [
        ({"allowed_token_ids": [1], "min_tokens": 1}, False),
        ({"allowed_token_ids": [1], "min_tokens": 1, "ignore_eos": True}, True),
        ({"allowed_token_ids": [1], "min_tokens": 0}, True),
        ({"allowed_token_ids": [1, 5], "min_tokens": 1}, True),
        ({"allowed_token_ids": [1, 5], "min_tokens": 1, "stop_token_ids": [5]}, False),
        ({"allowed_token_ids": [1], "min_tokens": 0, "max_tokens": 0, "prompt_logprobs": 0}, True),
        ({"stop_token_ids": "all", "min_tokens": 1}, False),
        ({"stop_token_ids": "all", "min_tokens": 0}, True),
    ],
    ids=str,
)
def test_a_request_that_leaves_no_token_is_the_client_s_mistake(fields: dict[str, Any], ok: bool) -> None:
    if fields.get("stop_token_ids") == "all":
        fields = {**fields, "stop_token_ids": range(limits().vocab_size)}
    if ok:
        intake().prepare(prompt("hi"), SamplingParams(**fields), {})
        return
    with pytest.raises(ClientError, match="no token is left") as caught:
        intake().prepare(prompt("hi"), SamplingParams(**fields), {})
    assert caught.value.param == "min_tokens"


def test_bad_words_that_forbid_all_allowed_tokens_are_refused() -> None:
    ids = [word[0] for word in limits().bad_words_ids(SamplingParams(bad_words=["a"])) if len(word) == 1]
    with pytest.raises(ClientError, match="no token is left"):
        intake().prepare(prompt("hi"), SamplingParams(allowed_token_ids=ids, bad_words=["a"]), {})


@pytest.mark.parametrize("priority", ["x", None, 1.5, float("nan"), True, 2**31, -(2**31), 10**5000], ids=range(8))
def test_a_priority_that_cannot_be_compared_is_refused(priority: Any) -> None:
    with pytest.raises(ClientError, match="priority must be an integer") as caught:
        intake().prepare(prompt("hi"), SamplingParams(), {"priority": priority})
    assert caught.value.param == "priority"
