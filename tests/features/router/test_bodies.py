"""Which requests are handed over, and what each of the two servers is sent (PDX-12)."""

import pytest

from octavo.features.router.bodies import (
    RouteKind,
    decode_body,
    estimated_tokens,
    only_prompt,
    params_of,
    prefill_body,
    worth_disaggregating,
)  # fmt: skip

LONG = "word " * 200
CHAT = {"messages": [{"role": "user", "content": LONG}]}


def worth(kind=RouteKind.COMPLETION, minimum=64, **body):
    return worth_disaggregating(body, kind, minimum)


def test_a_long_prompt_with_one_answer_is_handed_over():
    assert worth(prompt=LONG, max_tokens=50)
    assert worth(prompt=list(range(64)))
    assert worth(prompt=[LONG], n=1, best_of=1, echo=False, stream=True)
    assert worth(RouteKind.CHAT, **CHAT)
    assert worth(RouteKind.CHAT, **CHAT, max_completion_tokens=2)


@pytest.mark.parametrize(
    "field",
    [
        {"echo": True}, {"prompt_logprobs": 0}, {"n": 2}, {"best_of": 3}, {"max_tokens": 1}, {"max_tokens": 0},
        {"max_completion_tokens": 1}, {"max_tokens": "50"}, {"max_tokens": 5.5}, {"max_tokens": True}, {"n": "1"},
        {"prompt": [LONG, LONG]}, {"prompt": [[1] * 100, [2] * 100]}, {"prompt": []}, {"prompt": None},
        {"prompt": ["a", 1]}, {"prompt": "short"}, {"prompt": [1, 2, 3]}, {"kv_transfer_params": {"lease": 1}},
    ],
)  # fmt: skip
def test_what_gains_nothing_or_is_odd_goes_whole(field):
    assert not worth(**{"prompt": LONG, **field})


def test_a_chat_that_is_odd_goes_whole():
    for messages in (None, "x", [], [1], [{"role": "user"}], [{"role": "user", "content": "short"}]):
        assert not worth(RouteKind.CHAT, messages=messages)
    assert not worth_disaggregating({}, RouteKind.CHAT, 64)


def test_the_length_is_estimated_from_text_in_all_its_places():
    assert estimated_tokens({"prompt": "a" * 400}, RouteKind.COMPLETION) == 100
    assert estimated_tokens({"prompt": [5] * 33}, RouteKind.COMPLETION) == 33
    parts = [{"type": "text", "text": "b" * 400}, {"type": "image_url"}, 7]
    messages = [{"role": "system", "content": "a" * 400}, {"role": "user", "content": parts}]
    assert estimated_tokens({"messages": messages}, RouteKind.CHAT) == 208


def test_one_prompt_is_found_in_each_of_its_shapes():
    assert only_prompt({"prompt": "a"}) == only_prompt({"prompt": ["a"]}) == "a"
    assert only_prompt({"prompt": [1, 2]}) == only_prompt({"prompt": [[1, 2]]}) == [1, 2]
    assert only_prompt({"prompt": [True, 2]}) is None
    assert only_prompt({}) is None


def test_the_prefill_body_asks_for_one_token_and_keeps_the_rest():
    body = {
        "model": "m", "prompt": LONG, "stream": True, "stream_options": {"include_usage": True}, "n": None,
        "max_tokens": 99, "min_tokens": 5, "temperature": 0.5, "cache_salt": "s", "seed": 3,
    }  # fmt: skip
    assert prefill_body(body, RouteKind.COMPLETION) == {
        "model": "m", "prompt": LONG, "stream": False, "n": 1, "max_tokens": 1, "temperature": 0.5, "cache_salt": "s",
        "seed": 3, "kv_transfer_params": {"do_remote_decode": True},
    }  # fmt: skip
    assert body["max_tokens"] == 99 and body["stream"] is True


def test_a_chat_has_both_limits_lowered_where_the_client_gave_both():
    sent = prefill_body({**CHAT, "max_completion_tokens": 50}, RouteKind.CHAT)
    assert (sent["max_tokens"], sent["max_completion_tokens"]) == (1, 1)
    assert "max_completion_tokens" not in prefill_body(CHAT, RouteKind.CHAT)


def test_the_decode_body_is_the_clients_own_with_the_parameters():
    body = {"prompt": LONG, "stream": True}
    assert decode_body(body, {"lease": 1}) == {**body, "kv_transfer_params": {"lease": 1}}


@pytest.mark.parametrize(
    "answer", [None, [], "x", {}, {"kv_transfer_params": None}, {"kv_transfer_params": {}}, {"kv_transfer_params": [1]}]
)
def test_an_answer_without_parameters_keeps_nothing_for_another(answer):
    assert params_of(answer) is None


def test_parameters_are_passed_on_as_they_are():
    assert params_of({"kv_transfer_params": {"a": [1], "b": None}}) == {"a": [1], "b": None}


def test_whole_numbers_are_integers_and_true_is_none() -> None:
    """F91, F12: the router reads numbers as the servers behind it do."""
    assert worth(prompt=LONG, max_tokens=20.0, n=1.0) and not worth(prompt=LONG, max_tokens=1.0)
    assert not worth(prompt=LONG, max_tokens=2.5) and not worth(prompt=LONG, n=True)
    assert only_prompt({"prompt": [1.0, 2]}) == [1, 2] and only_prompt({"prompt": [[3.0]]}) == [3]
    assert only_prompt({"prompt": [1.5]}) is None
