"""Wrong requests get a 400 that names the field, and nobody else notices: API-01, API-03, API-05, API-06, API-11."""

import json

import httpx
import numpy as np
import pytest
import torch

from tests.support import checkpoints
from tests.support.live import live


@pytest.fixture(scope="module")
def short():
    with live(checkpoints.tiny_llama(), num_kv_blocks=64, num_threads=1, max_model_len=128) as server:
        yield server


def words(server, count):
    """A text of exactly this many tokens, and as many ids."""
    for length in range(count // 4, 4 * count):
        text = "z" * length
        ids = server.post("/tokenize", prompt=text).json()["tokens"]
        if len(ids) == count:
            return text, ids
    raise AssertionError(f"no text of {count} tokens")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("count", "ok"), [(127, True), (128, False), (129, False), (100_000, False)])
def test_api01_a_prompt_longer_than_the_context_is_refused_with_both_numbers(short, stream, n, count, ok):
    for prompt in words(short, count) if count < 1000 else ("z" * 3 * count, [5] * count):
        body = {"prompt": prompt, "max_tokens": 1, "stream": stream, "n": n, "temperature": 0.7}
        answer = short.post("/v1/completions", **body)
        assert answer.status_code == (200 if ok else 400), answer.text[:300]
        if not ok:
            error = answer.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "128" in error["message"]
            assert len(answer.content) < 2000
            if count < 1000:
                assert str(count) in error["message"]
    assert short.http.get("/health").status_code == 200
    assert short.text("hello", max_tokens=2)


def test_api01_chat_too(short):
    for stream in (False, True):
        messages = [{"role": "user", "content": "z" * 1000}]
        answer = short.post("/v1/chat/completions", messages=messages, stream=stream, max_tokens=1)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_api03_echo_with_no_tokens_scores_the_prompt(chat135m, chat_path, reference):
    prompt = "Your answer: Yes"
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
    answer = chat135m.post("/v1/completions", **body)
    assert answer.status_code == 200, answer.text
    data = answer.json()
    scores = data["choices"][0]["logprobs"]["token_logprobs"]
    assert data["choices"][0]["text"] == prompt
    assert data["usage"]["completion_tokens"] == 0
    ids = chat135m.post("/tokenize", prompt=prompt).json()["tokens"]
    assert scores[0] is None
    logits = torch.from_numpy(reference.logits(ids, 1))
    truth = torch.log_softmax(logits, -1)[range(len(ids) - 1), ids[1:]].numpy()
    np.testing.assert_allclose(scores[1:], truth, atol=1e-3)
    events = chat135m.events("/v1/completions", **body)
    assert "".join(c["text"] for e in events for c in e["choices"]) == prompt
    streamed = [x for e in events for c in e["choices"] if c["logprobs"] for x in c["logprobs"]["token_logprobs"]]
    assert streamed[0] is None
    np.testing.assert_allclose(streamed[1:], truth, atol=1e-3)


BAD_IDS = [[49152], [-1], [2**31], [2**32 + 5], [2**63], [1, "a"], [1.5], [True], [1, None], [[1, -1]], [[1], "x"]]


@pytest.mark.parametrize("prompt", BAD_IDS, ids=str)
def test_api05_token_ids_outside_the_vocabulary_are_refused_by_value_and_range(chat135m, prompt):
    answer = chat135m.post("/v1/completions", prompt=prompt, max_tokens=1)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "prompt" in message
    flat = [x for p in prompt for x in (p if isinstance(p, list) else [p])]
    bad = next(x for x in flat if type(x) is not int or not 0 <= x < 49152)
    if type(bad) is int:
        assert str(bad) in message
        assert "4915" in message, "the range is named"


def test_api05_padded_rows_of_the_vocabulary_are_never_sampled():
    path = checkpoints.tiny_llama(vocab_size=576)  # 64 rows more than the tokenizer has tokens
    with live(path, num_kv_blocks=256, num_threads=1) as server:
        for seed in range(4):
            body = {"max_tokens": 50, "temperature": 5, "seed": seed, "ignore_eos": True, "return_token_ids": True}
            ids = server.complete("hi", **body)["choices"][0]["token_ids"]
            assert len(ids) == 50
            assert max(ids) < 512
        assert server.post("/v1/completions", prompt=[560], max_tokens=1).status_code == 400


def raw(server, content, content_type="application/json", path="/v1/chat/completions"):
    headers = {} if content_type is None else {"content-type": content_type}
    return httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=60)


BODIES = [
    b'{"model": "tiny", x}', b"", b"[]", b"null", b'"s"', b"123", b'{"model": "tiny", "temperature": NaN}',
    b'{"a": 1, "a": 2}', '{"model": "tiny"}'.encode("utf-16"), b"{" * 5000, b"[" * 100000, b"\xff\xfe\x00",
    b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud83d"}], "temperature": "x"}',
]  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_api06_bodies_that_are_no_request_are_told_so_in_json(tiny, path, body):
    answer = raw(tiny, body, path=path)
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["message"]
    assert len(answer.content) < 2000


@pytest.mark.parametrize("content_type", ["text/plain", None, "application/xml", "multipart/form-data"])
def test_api06_content_types(tiny, content_type):
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}).encode()
    answer = raw(tiny, body, content_type)
    assert answer.status_code == 200 or (400 <= answer.status_code < 500 and answer.json()["error"]["message"])


WRONG = {
    "messages": [5, "x", {"role": "user"}, [], [5], [{"role": "user", "content": 5}], [{"content": "x"}], None],
    "tools": ["x", 5, [5], {}],
    "stop": [{}, 5, [5]],
    "stream": ["maybe", 3],
    "temperature": ["hot", -1, [], True],
    "n": [0, "x", 1.5],
    "max_tokens": ["x", -1, 1.5],
    "logit_bias": ["x", [1], {"abc": 1}],
    "top_p": [-0.5, 2, "x"],
    "seed": ["x", 1.5],
    "logprobs": ["x"],
    "top_logprobs": [99, -1, "x"],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, vs in WRONG.items() for v in vs], ids=str)
def test_api06_wrong_types_name_their_field(tiny, field, value):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, field: value}
    answer = tiny.post("/v1/chat/completions", **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert field in (error["param"] or "") or field in error["message"]
    assert "Traceback" not in answer.text


def test_api06_a_lone_surrogate_gives_valid_json(tiny):
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud83d"}], "max_tokens": 2}'
    answer = raw(tiny, body)
    assert answer.status_code in (200, 400)
    answer.json()


def test_api06_tool_calls_of_a_wrong_type(tiny):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": 3}]
    assert tiny.post("/v1/chat/completions", messages=messages).status_code == 400


def test_api11_unknown_models_are_404_and_an_absent_one_is_the_one_served(tiny):
    answer = tiny.http.post("/v1/completions", json={"model": "nope", "prompt": "x"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "model_not_found"
    assert "nope" in error["message"]
    assert tiny.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("field", "near"), [("temprature", "temperature"), ("max_token", "max_tokens"), ("stop_token_id", "stop_token_ids")]
)
def test_api11_a_misspelt_field_is_400_with_the_right_name(tiny, field, near):
    answer = tiny.post("/v1/completions", prompt="x", max_tokens=1, **{field: 1})
    assert answer.status_code == 400
    assert near in answer.json()["error"]["message"]


def test_api11_an_unknown_field_is_accepted_and_named(tiny):
    answer = tiny.post("/v1/completions", prompt="x", max_tokens=1, frobnicate=1)
    assert answer.status_code == 200
    assert any("frobnicate" in v for v in answer.headers.values())


def test_api11_a_misplaced_schema_says_where_it_belongs(tiny):
    messages = [{"role": "user", "content": "x"}]
    answer = tiny.post("/v1/chat/completions", messages=messages, response_format={"type": "json_schema", "schema": {}})
    assert answer.status_code == 400
    assert "json_schema" in answer.json()["error"]["message"]


@pytest.mark.skip(reason="waits for structured output: a well-placed schema is enforced")
def test_api11_a_well_placed_schema_is_enforced():
    raise AssertionError
