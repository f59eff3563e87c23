"""From input to engine requests (REQ-5, OUT-7)."""

from concurrent.futures import ThreadPoolExecutor

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
