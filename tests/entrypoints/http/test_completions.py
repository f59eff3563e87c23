"""`/v1/completions` over a real socket: shapes, batches, echo and scores, limits."""

import json

import pytest
from openai import BadRequestError, OpenAI

from octavo.config.schema import ServerConfig
from octavo.features.transfer.disagg import TransferHint
from octavo.features.transfer.options import TransferOptions
from octavo.plugins.features import joined
from tests.entrypoints.http.events import check_error, text_stream
from tests.entrypoints.http.toy import BOS, VOCAB_SIZE, text_script
from tests.entrypoints.http.toy_server import MODEL, Served, toy_server

EMOJI = "x\u00e9\U0001f9d1\u6b6a done"


def test_plain_answer_has_openais_shape(served: Served) -> None:
    answer = served.complete(model=MODEL, prompt="hi", max_tokens=60, temperature=0).json()
    assert answer["object"] == "text_completion" and answer["model"] == MODEL
    assert answer["id"].startswith("cmpl-") and type(answer["created"]) is int
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "text": "answer 0 to hi",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert answer["usage"] == {
        "prompt_tokens": 2, "completion_tokens": 15, "total_tokens": 17, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"include_usage": False}])
@pytest.mark.parametrize("n", [1, 3])
def test_stream_equals_plain_answer(served: Served, options: dict | None, n: int) -> None:
    """OUT-23, STR-05, STR-07."""
    body = {"prompt": "hello", "max_tokens": 60, "n": n, "seed": 3}
    plain = served.complete(**body).json()
    wants = bool(options and options["include_usage"])
    stream = text_stream(served.complete(**body, stream=True, stream_options=options), include_usage=wants)
    assert stream.texts == {c["index"]: c["text"] for c in plain["choices"]}
    assert stream.finish == {c["index"]: c["finish_reason"] for c in plain["choices"]}
    assert len(set(stream.texts.values())) == n  # SED-03: samples differ
    if wants:
        assert stream.usage == plain["usage"]


def test_continuous_usage_grows_on_every_chunk(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = served.complete(prompt="ab", stream=True, stream_options=options)
    stream = text_stream(response, include_usage=True, continuous=True)
    counts = [c["usage"]["completion_tokens"] for c in stream.chunks]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 15
    assert all(c["usage"]["prompt_tokens"] == 2 for c in stream.chunks)


def test_no_half_characters_are_streamed() -> None:
    """STR-01: bytes of a character are tokens of their own here."""
    with toy_server(text_script(EMOJI)) as served:
        body = {"prompt": "x", "max_tokens": 64, "temperature": 0}
        response = served.complete(**body, stream=True)
        stream = text_stream(response)
        assert "\ufffd" not in response.text
        assert stream.texts[0] == served.complete(**body).json()["choices"][0]["text"] == EMOJI


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_over_tokens_is_not_leaked(include: bool) -> None:
    """STP-01."""
    with toy_server(text_script("BCDEFGHIJK")) as served:
        body = {"prompt": "A", "stop": ["DEFG"], "max_tokens": 20, "include_stop_str_in_output": include}
        plain = served.complete(**body).json()
        stream = text_stream(served.complete(**body, stream=True))
        assert stream.texts[0] == plain["choices"][0]["text"] == ("BCDEFG" if include else "BC")
        assert stream.finish[0] == plain["choices"][0]["finish_reason"] == "stop"
        assert stream.stop_reason[0] == plain["choices"][0]["stop_reason"] == "DEFG"
        assert plain["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab"], ["ab"]),
        (["ab", "cd", "ef"], ["ab", "cd", "ef"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
)
def test_every_kind_of_prompt_is_answered_in_order(served: Served, prompt: object, texts: list[str]) -> None:
    """INP-20: choice p * n + i is answer i to prompt p, plain and streamed."""
    body = {"prompt": prompt, "max_tokens": 60, "n": 2, "temperature": 1}
    expected = [f"answer {i} to {text}" for text in texts for i in range(2)]
    plain = served.complete(**body).json()
    assert [c["text"] for c in plain["choices"]] == expected
    assert [c["index"] for c in plain["choices"]] == list(range(len(expected)))
    assert plain["usage"]["prompt_tokens"] == sum(map(len, texts))
    stream = text_stream(
        served.complete(**body, stream=True, stream_options={"include_usage": True}), include_usage=True
    )
    assert [stream.texts[i] for i in range(len(expected))] == expected
    assert stream.usage == plain["usage"]


@pytest.mark.parametrize(
    "prompt",
    [[VOCAB_SIZE], [-1], [2**31], [2**32 + 5], [2**63], [10**300], [1, "a"], [1.5], [True], [None], [[1], "a"],
     ["a", [1]], ["a", 5], [[1], [1.5]], [], "", [[]], {}, 5, None, True, [[[1]]]],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_prompts_are_refused_by_value(served: Served, prompt: object, stream: bool) -> None:
    """API-05: nothing is narrowed, nothing reaches the engine."""
    before = len(served.engine.seen)
    error = check_error(served.complete(prompt=prompt, stream=stream), 400)
    assert error["param"].startswith("prompt")
    assert len(served.engine.seen) == before
    if prompt == [VOCAB_SIZE]:
        assert str(VOCAB_SIZE) in error["message"] and str(VOCAB_SIZE - 1) in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [256, 257, 100_000])
def test_prompts_over_the_context_are_refused_with_the_numbers(served: Served, length: int, stream: bool) -> None:
    """API-01: 400 before any event; the limit and the length are named."""
    for prompt in ("a" * length, [97] * length):
        error = check_error(served.complete(prompt=prompt, n=2, stream=stream), 400)
        assert error["code"] == "context_length_exceeded"
        assert "256" in error["message"] and str(length) in error["message"]
    assert served.http.get("/health").status_code == 200


def test_prompt_that_leaves_one_token_is_served(served: Served) -> None:
    """API-01; and the default of 16 tokens is lowered where the client asked for none."""
    assert served.complete(prompt="a" * 255, max_tokens=1).json()["usage"]["completion_tokens"] == 1
    assert served.complete(prompt="a" * 255).json()["usage"]["completion_tokens"] == 1
    error = check_error(served.complete(prompt="a" * 255, max_tokens=2), 400, param="max_tokens")
    assert error["code"] == "context_length_exceeded"


def test_echo_with_no_tokens_scores_the_prompt(served: Served) -> None:
    """API-03, LOG-02: one entry a prompt token, the first null, plain and streamed alike."""
    body = {"prompt": "Your answer: Yes", "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
    plain = served.complete(**body).json()
    (choice,) = plain["choices"]
    scores = choice["logprobs"]
    assert "prompt_logprobs" not in choice
    assert choice["text"] == body["prompt"] and choice["finish_reason"] == "length"
    assert plain["usage"]["completion_tokens"] == 0
    assert scores["tokens"] == list(body["prompt"])
    assert scores["text_offset"] == list(range(16))
    assert scores["token_logprobs"] == [None] + [-9999.0 if i % 9 == 8 else -i / 8 for i in range(1, 16)]
    assert scores["top_logprobs"][0] is None
    assert scores["top_logprobs"][1] == {"o": -0.125, "p": pytest.approx(-0.1)}
    stream = text_stream(served.complete(**body, stream=True))
    parts = [c["choices"][0]["logprobs"] for c in stream.chunks if c["choices"][0]["logprobs"]]
    assert parts == [scores] and stream.texts[0] == body["prompt"] and stream.finish == {0: "length"}


@pytest.mark.parametrize("prompt", ["\u00e9a", [0xC3, 0xA9, 0x61]])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_goes_before_the_answer_with_offsets_in_characters(served: Served, prompt: object, stream: bool) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 3}
    if stream:
        result = text_stream(served.complete(**body, stream=True))
        text = result.texts[0]
        parts = [c["choices"][0]["logprobs"] for c in result.chunks if c["choices"][0]["logprobs"]]
        offsets = [offset for part in parts for offset in part["text_offset"]]
    else:
        (choice,) = served.complete(**body).json()["choices"]
        text, offsets = choice["text"], choice["logprobs"]["text_offset"]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.125, -0.25, -0.5, -0.5, -0.5]
    assert text == "\u00e9aans"
    assert offsets == [0, 0, 1, 2, 3, 4]


def test_logprobs_without_echo(served: Served) -> None:
    (choice,) = served.complete(prompt="q", max_tokens=2, logprobs=2).json()["choices"]
    assert choice["logprobs"] == {
        "tokens": ["a", "n"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "b": -1.0}, {"n": -0.5, "o": -1.0}],
        "text_offset": [0, 1],
    }


def test_max_tokens_zero_needs_echo(served: Served) -> None:
    check_error(served.complete(prompt="a", max_tokens=0), 400, param="max_tokens")
    answer = served.complete(prompt="ab", max_tokens=0, echo=True).json()["choices"][0]
    assert answer["text"] == "ab" and answer["logprobs"] is None
    answer = served.complete(prompt="ab", max_tokens=0, prompt_logprobs=1).json()["choices"][0]
    assert answer["text"] == ""
    assert answer["prompt_logprobs"] == [
        None, {"98": {"logprob": -0.125, "rank": 2, "decoded_token": "b"}, "99": {"logprob": pytest.approx(-0.1), "rank": 1, "decoded_token": "c"}},
    ]  # fmt: skip


def test_token_ids_come_back_when_asked(served: Served) -> None:
    body = {"prompt": "ab", "max_tokens": 3, "return_token_ids": True}
    (choice,) = served.complete(**body).json()["choices"]
    assert choice["prompt_token_ids"] == [97, 98] and choice["token_ids"] == list(b"ans")
    stream = text_stream(served.complete(**body, stream=True))
    assert stream.chunks[0]["choices"][0]["prompt_token_ids"] == [97, 98]
    assert [t for c in stream.chunks for t in c["choices"][0].get("token_ids", [])] == list(b"ans")


def test_best_of_and_suffix_are_refused_clearly(served: Served) -> None:
    check_error(served.complete(prompt="a", best_of=3), 400, param="best_of")
    check_error(served.complete(prompt="a", n=2, best_of=3), 400, param="best_of")
    assert served.complete(prompt="a", n=2, best_of=2).status_code == 200
    assert "not available" in check_error(served.complete(prompt="a", suffix="b"), 400, param="suffix")["message"]
    assert served.complete(prompt="a", suffix=None, best_of=None).status_code == 200


def test_bos_is_added_once_and_can_be_left_out() -> None:
    """TPL-04."""
    with toy_server(adds_bos=True) as served:
        for prompt, special, ids in [
            ("hi", None, [BOS, 104, 105]), ("<s>hi", None, [BOS, 104, 105]), ("hi", False, [104, 105]),
        ]:  # fmt: skip
            served.complete(prompt=prompt, max_tokens=1, add_special_tokens=special)
            assert list(served.engine.seen[-1].prompt_token_ids) == ids
        served.chat(max_tokens=1)
        assert served.engine.seen[-1].prompt_token_ids.count(BOS) == 1


def test_a_batch_is_refused_as_a_whole(served: Served) -> None:
    before = len(served.engine.seen)
    error = check_error(served.complete(prompt=["fine", "a" * 300]), 400)
    assert error["message"].startswith("prompt 1: ")
    assert len(served.engine.seen) == before
    check_error(served.complete(prompt=["a"] * 65), 400, param="prompt")


def test_official_client_reads_all_of_it(served: Served) -> None:
    """STR-07."""
    client = OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
    with client:
        plain = client.completions.create(model=MODEL, prompt="hey", max_tokens=60, logprobs=2)
        assert plain.choices[0].text == "answer 0 to hey"
        with client.completions.create(model=MODEL, prompt="hey", max_tokens=60, stream=True) as stream:
            assert "".join(chunk.choices[0].text for chunk in stream) == "answer 0 to hey"
        with pytest.raises(BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt="hey", temperature=9000)
        assert caught.value.param == "temperature" and caught.value.code is None


def test_options_of_a_request_reach_the_engine(served: Served) -> None:
    served.http.post(
        "/v1/completions",
        json={"prompt": "a", "priority": -3, "cache_salt": "s", "request_id": "mine", "max_tokens": 1,
              "logit_bias": {"97": 5}, "stop_token_ids": [98], "bad_words": ["zz"], "min_p": 0.25, "top_k": 7,
              "repetition_penalty": 1.5, "ignore_eos": True, "allowed_token_ids": [97, 98]},
        headers={"traceparent": "00-1-2-01"},
    )  # fmt: skip
    request = served.engine.seen[-1]
    assert (request.priority, request.cache_salt, request.client_id) == (-3, "s", "mine")
    assert request.trace_headers == {"traceparent": "00-1-2-01"}
    sampling = request.sampling
    assert sampling.logit_bias == {97: 5.0} and sampling.stop_token_ids == (98,) and sampling.top_k == 7
    assert sampling.min_p == 0.25 and sampling.repetition_penalty == 1.5 and sampling.ignore_eos
    assert sampling.allowed_token_ids == (97, 98) and request.bad_words_ids
    assert request.request_id != "mine" and "mine" not in request.request_id


@pytest.mark.parametrize("bias", [{"99999999": -100}, {"abc": 1}, {"-5": 1}, {str(2**31): 1}, {"1_0": 1}, {"5": 101}])
def test_wrong_logit_bias_names_its_key(served: Served, bias: dict) -> None:
    """SMP-02."""
    error = check_error(served.complete(prompt="a", logit_bias=bias), 400, param="logit_bias")
    assert next(iter(bias)) in error["message"]


@pytest.mark.parametrize("ids", [[99999999], [-1], [VOCAB_SIZE], [2**40]])
def test_stop_token_ids_outside_the_vocabulary(served: Served, ids: list[int]) -> None:
    """STP-05."""
    error = check_error(served.chat(stop_token_ids=ids, min_tokens=2, max_tokens=8), 400, param="stop_token_ids")
    assert str(ids[0]) in error["message"] and str(VOCAB_SIZE - 1) in error["message"]


def test_authors_defaults_apply_under_the_requests_own_values() -> None:
    """INP-22."""
    defaults = {"temperature": 0.5, "top_k": 9, "max_tokens": 5, "not_a_parameter": 1}
    with toy_server(defaults=defaults, server=ServerConfig()) as served:
        assert served.complete(prompt="a", top_k=3).json()["usage"]["completion_tokens"] == 5
        sampling = served.engine.seen[-1].sampling
        assert (sampling.temperature, sampling.top_k) == (0.5, 3)
        served.chat()
        assert served.engine.seen[-1].sampling.max_tokens == 5
        card = served.http.get("/v1/models").json()["data"][0]
        assert json.loads(json.dumps(card["default_sampling"]))["top_k"] == 9


def test_wishes_about_kv_are_understood_or_refused() -> None:
    """F56, F90: also on a server that moves no KV, where asking for nothing is no mistake."""
    nothing = {"do_remote_decode": False, "do_remote_prefill": False, "remote_block_ids": None}
    tiers = {"features": joined({"transfer": TransferOptions(kv_tier=("host?size=1MiB", "file:///kv"))})}
    with toy_server() as plain, toy_server(facts=tiers) as tiered:
        for params in ({"tiers": ["nope"]}, {"nope": 1}, {"do_remote_decode": True}):
            check_error(plain.complete(prompt="a", kv_transfer_params=params), 400, param="kv_transfer_params")
        for name, value in (("tiers", ["nope"]), ("nope", 1), ("do_remote_decode", True), ("tier_policy", "x")):
            error = check_error(tiered.complete(prompt="a", kv_transfer_params={name: value}), 400)
            assert error["param"] == f"kv_transfer_params.{name}" and name in error["message"]
        for params in ({}, None, nothing):
            assert plain.complete(prompt="a", kv_transfer_params=params, max_tokens=1).status_code == 200
        assert tiered.complete(prompt="a", kv_transfer_params={"tiers": ["file"]}, max_tokens=1).status_code == 200
        assert tiered.engine.seen[-1].part(TransferHint).data == {"tiers": ["file"]}
