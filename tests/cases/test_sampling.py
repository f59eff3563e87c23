"""Extreme temperatures and biases do what they mean: SMP-01, SMP-02."""

import math

import pytest

from tests.support import checkpoints
from tests.support.clients import together
from tests.support.live import live

PROMPT = "The three largest cities of France are"
TINY = [0, 1e-300, 1e-38, 1e-9, 1e-6, 1e-5, 1e-4]
SMALL = 1e-3
BIAS_PATHS = ["/v1/completions", "/v1/chat/completions"]


def asked(server, prompt, **body):
    """Text, token ids and log-probabilities of one answer."""
    answer = server.complete(prompt, return_token_ids=True, **body)
    choice = answer["choices"][0]
    return choice["text"], choice["token_ids"], choice["logprobs"]


def gaps(logprobs):
    """How far each chosen token is behind the best one."""
    pairs = zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    return [max(top.values()) - chosen for chosen, top in pairs]


# ---- SMP-01 ----------------------------------------------------------------------------------


def test_smp01_tiny_temperatures_are_greedy_alone_and_in_a_mixed_batch(chat135m):
    greedy = asked(chat135m, PROMPT, max_tokens=16, logprobs=1)
    assert max(gaps(greedy[2])) == 0
    hot = {"max_tokens": 16, "temperature": 1.5, "seed": 1}
    calls = [lambda t=t: asked(chat135m, PROMPT, max_tokens=16, temperature=t, logprobs=1) for t in [*TINY, SMALL]]
    *cold, small, wild, _ = together(
        [*calls, lambda: asked(chat135m, PROMPT, **hot), lambda: asked(chat135m, PROMPT, **hot, top_k=3)]
    )
    for text, ids, _ in cold:
        assert (text, ids) == greedy[:2]
    assert max(gaps(small[2])) < 20 * SMALL, "at this temperature a token 0.02 behind has a chance of 2e-9"
    assert wild[1] != greedy[1], "the neighbours are really drawn"
    assert asked(chat135m, PROMPT, max_tokens=16, temperature=1e-6)[:2] == greedy[:2]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_smp01_no_garbage_in_half_precision(chat_path, dtype):
    with live(chat_path, num_threads=1, dtype=dtype, max_model_len=256, num_kv_blocks=64) as server:
        body = {"max_tokens": 16, "logprobs": 1, "seed": 1, "ignore_eos": True}
        calls = [lambda t=t: asked(server, PROMPT, temperature=t, **body) for t in [0, 1e-9, 1e-6, 1e-5, 1e-4, SMALL]]
        *found, wild = together([*calls, lambda: asked(server, PROMPT, temperature=1.5, **body)])
        for text, ids, logprobs in found:
            assert len(ids) == 16
            assert text.strip()
            assert len(set(ids)) > 4, "no padding"
            assert all(math.isfinite(x) and x > -1000 for x in logprobs["token_logprobs"])
            assert max(gaps(logprobs)) <= 0.01
        assert all(math.isfinite(x) for x in wild[2]["token_logprobs"])


WITH = {
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "all three": {"top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {"40": 3, "41": -3}},
    "a few allowed": {"allowed_token_ids": [30, 40, 50, 60, 70]},
    "bad words": {"bad_words": ["the", "a"]},
    "min_tokens": {"min_tokens": 8},
    "scores": {"logprobs": 5},
}


@pytest.mark.parametrize("name", WITH)
def test_smp01_tiny_temperatures_are_greedy_with_every_other_parameter(tiny, name):
    """Masked logits among them: the limit is the same argmax."""
    body = {"max_tokens": 12, **WITH[name]}
    greedy = asked(tiny, "Once upon a time", **body)[:2]
    calls = [lambda t=t: asked(tiny, "Once upon a time", temperature=t, seed=9, **body)[:2] for t in TINY]
    noise = [lambda i=i: asked(tiny, "Once upon a time", temperature=1.5, **body, seed=i)[:2] for i in range(4)]
    found = together([*calls, *noise])
    assert found[: len(TINY)] == [greedy] * len(TINY)
    assert len(greedy[1]) > 0


def test_smp01_every_seed_and_answer_of_a_tiny_temperature_is_the_same(tiny):
    greedy = asked(tiny, "The page", max_tokens=10)[0]
    answer = tiny.complete("The page", max_tokens=10, temperature=1e-4, n=4, seed=77)
    assert [c["text"] for c in answer["choices"]] == [greedy] * 4
    assert {asked(tiny, "The page", max_tokens=10, temperature=1e-7, seed=s)[0] for s in range(8)} == {greedy}


def test_smp01_several_greedy_answers_are_equal(tiny):
    """As OpenAI's API: `n` is served whatever the temperature."""
    for temperature in (0, 1e-7):
        answer = tiny.complete("The page", temperature=temperature, n=3, max_tokens=10)
        assert len({c["text"] for c in answer["choices"]}) == 1
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2]


def test_smp01_temperatures_that_are_none_are_refused(tiny):
    for wrong in (-1e-9, -1, "1", 1e999):
        text = '{"model": "tiny", "prompt": "x", "temperature": %s}' % (f'"{wrong}"' if wrong == "1" else wrong)
        answer = tiny.http.post("/v1/completions", content=text, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]


@pytest.mark.skip(reason="waits for structured output: masked rows beside greedy ones")
def test_smp01_structured_rows_in_the_same_batch():
    raise AssertionError


# ---- SMP-02 ----------------------------------------------------------------------------------


def with_bias(server, path, bias, **body):
    """The raw answer to a request with this bias."""
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    return server.post(path, **prompt, logit_bias=bias, **{"max_tokens": 4, "temperature": 0, **body})


WRONG_KEYS = ["99999999", "49152", "-5", "-1", "abc", "1.5", "", " 7", "1e3", "2147483648", "4294967301",
              "9223372036854775808", "0x10"]  # fmt: skip


@pytest.mark.parametrize("path", BIAS_PATHS)
@pytest.mark.parametrize("key", WRONG_KEYS)
def test_smp02_keys_outside_the_vocabulary_are_refused_by_name(chat135m, path, key):
    for bias in ({key: -100}, {"5": 1, key: 1}):
        answer = with_bias(chat135m, path, bias)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert "logit_bias" in error["message"]
        assert key in error["message"]


@pytest.mark.parametrize("value", [101, -101, 1e9, "x", None, [1], True])
def test_smp02_values_outside_the_range_are_refused(chat135m, value):
    answer = with_bias(chat135m, "/v1/completions", {"5": value})
    assert answer.status_code == 400, answer.text
    assert "logit_bias" in answer.json()["error"]["message"]


def test_smp02_a_refused_bias_harms_no_neighbour(tiny):
    alone = tiny.text("A machine", max_tokens=40)
    answers = together(
        [lambda: tiny.text("A machine", max_tokens=40)]
        + [lambda: with_bias(tiny, "/v1/completions", {"99999999": -100}).status_code] * 8
    )
    assert answers == [alone] + [400] * 8


@pytest.mark.parametrize("chat", [False, True])
def test_smp02_minus_100_bans_and_plus_100_forces(chat135m, chat):
    path = "/v1/chat/completions" if chat else "/v1/completions"

    def first(bias, **body):
        answer = with_bias(chat135m, path, bias, return_token_ids=True, max_tokens=1, **body)
        assert answer.status_code == 200, answer.text
        return [choice["token_ids"][0] for choice in answer.json()["choices"]]

    (greedy,) = first(None)
    (second,) = first({str(greedy): -100})
    assert second != greedy
    assert first({str(greedy): -100, str(second): -100})[0] not in (greedy, second)
    rare = 40123
    assert first({str(rare): 100}) == [rare]
    assert greedy not in first({str(greedy): -100}, temperature=1.0, n=4, seed=3)
    assert first({str(rare): 100}, temperature=1.0, n=4, seed=3) == [rare] * 4


def test_smp02_a_ban_holds_for_the_whole_answer_and_for_nobody_else(tiny):
    ids = asked(tiny, "Hello", max_tokens=24, ignore_eos=True)[1]
    banned = {str(i): -100 for i in set(ids)}
    plain, biased, drawn = together(
        [
            lambda: asked(tiny, "Hello", max_tokens=24, ignore_eos=True)[1],
            lambda: asked(tiny, "Hello", max_tokens=24, ignore_eos=True, logit_bias=banned)[1],
            lambda: asked(tiny, "Hello", max_tokens=24, ignore_eos=True, temperature=1, seed=1, logit_bias=banned)[1],
        ]
    )
    assert plain == ids
    assert not set(biased) & set(ids)
    assert not set(drawn) & set(ids)


def test_smp02_forcing_the_end_ends_and_every_id_may_be_biased(tiny):
    assert asked(tiny, "Hello", max_tokens=24, logit_bias={"1": 100})[0] == ""
    everything = {str(i): 0.5 for i in range(512)}
    assert asked(tiny, "Hello", max_tokens=8, logit_bias=everything)[:2] == asked(tiny, "Hello", max_tokens=8)[:2]


def test_smp02_a_bias_on_rows_that_no_token_has_is_refused():
    with live(checkpoints.tiny_llama(vocab_size=576), num_kv_blocks=64, num_threads=1) as server:
        answer = with_bias(server, "/v1/completions", {"560": 100})
        assert answer.status_code == 400
        assert "560" in answer.json()["error"]["message"]
