"""Tokenization and render-only calls give the ids that generation uses (INP-3)."""

import pytest

from octavo.entrypoints.http.fields import WARNING_HEADER
from tests.entrypoints.http.events import check_error
from tests.entrypoints.http.toy import BOS, EOS, VOCAB_SIZE
from tests.entrypoints.http.toy_server import Served, toy_server

USER = {"role": "user", "content": "hi"}


def test_tokenize_and_back(served: Served) -> None:
    answer = served.http.post("/tokenize", json={"prompt": "h\u00e9", "return_token_strs": True}).json()
    assert answer == {
        "count": 3, "max_model_len": 256, "tokens": [104, 0xC3, 0xA9], "token_strs": ["h", "\ufffd", "\ufffd"],
    }  # fmt: skip
    back = served.http.post("/detokenize", json={"tokens": [*answer["tokens"], EOS]}).json()
    assert back == {"prompt": "h\u00e9</s>"}
    skipped = served.http.post("/detokenize", json={"tokens": [104, EOS], "skip_special_tokens": True}).json()
    assert skipped == {"prompt": "h"}


def test_every_way_in_gives_the_same_ids() -> None:
    """INP-3, TPL-04."""
    with toy_server(adds_bos=True) as served:
        body = {"messages": [USER], "chat_template_kwargs": {"mood": "calm"}}
        tokens = served.http.post("/tokenize", json=body).json()["tokens"]
        rendered = served.http.post("/v1/chat/completions/render", json=body).json()
        served.chat(**body, max_tokens=1)
        used = list(served.engine.seen[-1].prompt_token_ids)
        assert tokens == rendered["prompts"][0]["prompt_token_ids"] == used and used.count(BOS) == 1
        assert rendered["prompts"][0]["prompt"] == "[user]hi(mood calm)[assistant]"
        assert rendered["prompts"][0]["num_prompt_tokens"] == len(used)

        body = {"prompt": ["ab", "c"], "temperature": 0.5}
        rendered = served.http.post("/v1/completions/render", json=body).json()
        assert [p["prompt_token_ids"] for p in rendered["prompts"]] == [[BOS, 97, 98], [BOS, 99]]
        assert rendered["sampling_params"]["temperature"] == 0.5 and rendered["sampling_params"]["max_tokens"] == 16
        assert served.http.post("/tokenize", json={"prompt": "ab"}).json()["tokens"] == [BOS, 97, 98]
        bare = served.http.post("/tokenize", json={"prompt": "ab", "add_special_tokens": False}).json()
        assert bare["tokens"] == [97, 98]


def test_a_render_runs_nothing_and_refuses_what_generation_refuses(served: Served) -> None:
    before = len(served.engine.seen)
    response = served.http.post("/v1/chat/completions/render", json={"messages": [USER], "zorp": 1})
    assert response.status_code == 200 and "zorp" in response.headers[WARNING_HEADER]
    check_error(served.http.post("/v1/completions/render", json={"prompt": "a" * 300}), 400, param="prompt")
    check_error(served.http.post("/v1/completions/render", json={"prompt": "a", "model": "x"}), 404, param="model")
    assert len(served.engine.seen) == before


@pytest.mark.parametrize("tokens", [[-1], [VOCAB_SIZE], [2**70], ["a"], [1.5], [True], "abc", None])
def test_wrong_tokens_are_refused(served: Served, tokens: object) -> None:
    error = check_error(served.http.post("/detokenize", json={"tokens": tokens}), 400)
    assert error["param"].startswith("tokens")


def test_tokenize_needs_one_kind_of_prompt(served: Served) -> None:
    check_error(served.http.post("/tokenize", json={}), 400, param="prompt")
    check_error(served.http.post("/tokenize", json={"prompt": "a", "messages": [USER]}), 400, param="prompt")
    check_error(served.http.post("/tokenize", json={"messages": [{"role": "x"}]}), 400)
