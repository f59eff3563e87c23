"""A stream and a plain answer to the same seeded request say the same, whatever fields are combined (STR-01, LOG-01)."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import checkpoints
from tests.support.live import Live, live

TEXTS = ("hello world", "日本語のテキスト", "👩‍👩‍👧‍👦 ok", "a", "The quick brown fox", "<s>x</s>")
FIELDS: dict[str, tuple[Any, ...]] = {
    "stop": (["e", "a"], ["\ufffd"], " ", ["th", "he "]),
    "stop_token_ids": ([5, 6, 7], list(range(100, 200))),
    "ignore_eos": (True,),
    "include_stop_str_in_output": (True,),
    "min_tokens": (1, 3),
    "repetition_penalty": (1.3, 0.8),
    "frequency_penalty": (-1,),
    "top_k": (3, 40),
    "top_p": (0.5, 0.95),
    "logit_bias": ({"1": 5}, {"9": 100}),
    "bad_words": (["e"],),
    "skip_special_tokens": (False,),
    "prompt_logprobs": (0, 2),
}


def a_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body that is served in most cases."""
    body: dict[str, Any] = {name: rng.choice(values) for name, values in FIELDS.items() if rng.random() < 0.15}
    body |= {"max_tokens": rng.choice((1, 2, 5, 20, 40)), "seed": rng.randrange(10**6), "return_token_ids": True}
    body["temperature"] = rng.choice((0, 0.7, 1, 2))
    if body["temperature"] and rng.random() < 0.4:
        body["n"] = rng.choice((2, 3))
    if rng.random() < 0.35:
        if rng.random() < 0.5:
            body |= {"logprobs": True, "top_logprobs": rng.choice((0, 2))}
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": rng.choice(TEXTS)}]}
    ids = [rng.randrange(512) for _ in range(rng.choice((1, 3, 20)))]
    body["prompt"] = rng.choice((rng.choice(TEXTS), [rng.choice(TEXTS), rng.choice(TEXTS)], ids))
    if rng.random() < 0.5:
        body["logprobs"] = rng.choice((0, 1, 3))
    if rng.random() < 0.4:
        body["echo"] = True
    return "/v1/completions", body


class Told:
    """What one choice said, plain or in pieces.

    Owns: its fields.
    """

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.ends: list[Any] = []
        self.scores: list[Any] = []
        self.offsets: list[int] = []
        self.tokens: list[str] = []
        self.prompt_scores: list[Any] = []

    def add(self, choice: dict[str, Any]) -> None:
        """One more piece."""
        said = choice.get("delta", choice.get("message"))
        self.text += choice["text"] if said is None else said.get("content") or ""
        self.ids += choice.get("token_ids") or []
        if choice["finish_reason"]:
            self.ends.append((choice["finish_reason"], choice.get("stop_reason")))
        scores = choice.get("logprobs")
        if scores and "content" in scores:
            self.scores += [entry["logprob"] for entry in scores["content"]]
            self.tokens += [entry["token"] for entry in scores["content"]]
        elif scores:
            self.scores += scores["token_logprobs"]
            self.tokens += scores["tokens"]
            self.offsets += scores["text_offset"]
        self.prompt_scores += [sorted(line or {}) for line in choice.get("prompt_logprobs") or []]


def choices(answers: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What each index said in all."""
    found: dict[int, Told] = {}
    for answer in answers:
        for choice in answer["choices"]:
            found.setdefault(choice["index"], Told()).add(choice)
    return {index: vars(told) for index, told in found.items()}


def assert_same(streamed: dict[int, dict[str, Any]], plain: dict[int, dict[str, Any]]) -> None:
    """Equal but for the last digits of scores, which may depend on the size of the batch."""
    assert streamed.keys() == plain.keys()
    for index, told in plain.items():
        assert streamed[index] == {**told, "scores": pytest.approx(told["scores"], abs=1e-3)}


@pytest.fixture(scope="module", params=[{}, {"async_scheduling": True, "max_num_seqs": 3}], ids=["in-turn", "async"])
def server(request: pytest.FixtureRequest) -> Iterator[Live]:
    with live(
        checkpoints.tiny_llama(),
        num_kv_blocks=64,
        num_threads=1,
        max_model_len=256,
        enable_prefix_caching=False,
        **request.param,
    ) as server:
        yield server


@pytest.mark.parametrize("seed", range(40))
def test_a_stream_and_a_plain_answer_are_the_same(server: Live, seed: int) -> None:
    path, body = a_request(random.Random(seed))
    plain = server.post(path, **body)
    if plain.status_code != 200:
        assert plain.status_code == 400
        assert server.post(path, **body, stream=True).status_code == 400
        return
    raw = server.post(path, **body, stream=True, stream_options={"include_usage": True}).text
    events = [json.loads(line[6:]) for line in raw.split("\n") if line.startswith("data: {")]
    told = choices([plain.json()])
    assert_same(choices(events), told)
    usage = plain.json()["usage"]
    assert [e["usage"] for e in events if e["usage"]] == [usage]
    assert usage["completion_tokens"] == sum(len(c["ids"]) for c in told.values())
    for choice in told.values():
        check(choice, body)


def check(choice: dict[str, Any], body: dict[str, Any]) -> None:
    """One answer agrees with itself and with what was asked for."""
    ((reason, stop),) = choice["ends"]
    text, ids = choice["text"], choice["ids"]
    assert len(ids) >= body.get("min_tokens", 0)
    assert reason == "stop" or len(ids) == body["max_tokens"]
    if isinstance(stop, str) and body.get("include_stop_str_in_output"):
        assert text.endswith(stop)
    if isinstance(stop, str) and not body.get("include_stop_str_in_output") and not body.get("echo"):
        assert stop not in text
    if stop is None and "\ufffd" not in text and not body.get("stop"):
        for at, token in zip(choice["offsets"], choice["tokens"], strict=False):
            if not token.startswith("<"):  # a special token may not be shown
                assert text[at : at + len(token)].strip() == token.strip()


def test_offsets_of_an_echoed_prompt_are_those_of_its_text(server: Live) -> None:
    """The BOS that the tokenizer adds has an entry without text, and special tokens in the text are shown (F13)."""
    for prompt, skip in (("hello world", True), ("hello world", False), ("<s>x</s>hello", True), ("<s>x</s>", False)):
        body = {"echo": True, "logprobs": 0, "max_tokens": 1, "skip_special_tokens": skip}
        choice = server.complete(prompt, **body)["choices"][0]
        scores = choice["logprobs"]
        pairs = list(zip(scores["text_offset"], scores["tokens"], strict=True))[:-1]
        if not prompt.startswith("<s>"):
            assert pairs[0] == (0, "")
            pairs = pairs[1:]
        assert "".join(token for _, token in pairs) == prompt
        assert all(prompt[at : at + len(token)] == token for at, token in pairs)
        assert scores["text_offset"][-1] == len(prompt)


def test_every_choice_of_a_stream_has_the_prompt_s_scores(server: Live) -> None:
    body = {
        "prompt": "hello world",
        "n": 3,
        "echo": True,
        "logprobs": 1,
        "prompt_logprobs": 1,
        "max_tokens": 2,
        "seed": 1,
    }
    answer = server.post("/v1/completions", **body).json()
    plain, num_prompt = choices([answer]), answer["usage"]["prompt_tokens"]
    streamed = choices(server.events("/v1/completions", **body))
    assert_same(streamed, plain)
    first, *others = ([*c["scores"]][:num_prompt] for c in streamed.values())
    assert len(first) == num_prompt
    assert all(other == first for other in others)
    assert all(c["prompt_scores"] for c in streamed.values())
