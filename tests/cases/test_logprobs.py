"""Scores of a prompt are the same whatever the cache holds: LOG-02."""

import numpy as np
import pytest
import torch

from tests.support import checkpoints
from tests.support.clients import together
from tests.support.live import live

BLOCK, CHUNK = 16, 32
LENGTHS = [2, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65, 70]
# A prompt that wants scores does not read the prefix cache: the logits of cached tokens do not exist, so all of
# its tokens are computed again. It does leave its blocks for others.


@pytest.fixture(scope="module")
def real(chat_path):
    with live(chat_path, num_threads=1, max_model_len=512, num_kv_blocks=128, max_num_batched_tokens=CHUNK) as server:
        yield server


@pytest.fixture(scope="module")
def small():
    path = checkpoints.tiny_llama()
    with live(path, num_kv_blocks=256, num_threads=1, max_num_batched_tokens=CHUNK) as server:
        yield server


@pytest.fixture(scope="module")
def cold():
    """Without a prefix cache and with prompts computed in one piece: what the others are measured by."""
    with live(checkpoints.tiny_llama(), num_kv_blocks=256, num_threads=1, enable_prefix_caching=False) as server:
        yield server


def ids_of(length, seed, low=5, high=500):
    """Token ids that begin differently for each seed."""
    return np.random.default_rng(seed).integers(low, high, length).tolist()


def by_prompt_logprobs(server, ids, **more):
    """The scores as `prompt_logprobs` gives them, in the order of the prompt, and what came from the cache."""
    answer = server.complete(ids, prompt_logprobs=1, max_tokens=1, **more)
    lines = answer["choices"][0]["prompt_logprobs"]
    assert lines[0] is None
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return [line[str(token)]["logprob"] for line, token in zip(lines[1:], ids[1:], strict=True)], cached


def by_echo(server, ids, max_tokens=0, **more):
    """The scores as echo gives them."""
    body = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, **more}
    scores = server.complete(ids, **body)["choices"][0]["logprobs"]["token_logprobs"]
    assert scores[0] is None
    assert len(scores) == len(ids) + max_tokens
    return scores[1 : len(ids)]


def by_streamed_echo(server, ids, **more):
    """The scores of a streamed echo."""
    body = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, **more}
    events = server.events("/v1/completions", **body)
    lines = [c["logprobs"]["token_logprobs"] for e in events for c in e["choices"] if c["logprobs"]]
    scores = [x for line in lines for x in line]
    assert scores[0] is None
    assert len(scores) == len(ids) + 1
    return scores[1 : len(ids)]


def is_whole(scores, length):
    """One finite number for each token but the first, and no filling."""
    values = np.array(scores, dtype=float)
    return len(values) == length - 1 and np.isfinite(values).all() and (values < 0).all() and (values > -1000).all()


def test_log02_scores_are_those_of_a_cold_server_and_of_the_reference(real, reference):
    prompt = ids_of(70, 1, 300, 40000)
    first, _ = by_prompt_logprobs(real, prompt)  # nothing is cached yet
    assert is_whole(first, len(prompt))
    logits = torch.from_numpy(reference.logits(prompt, 1))
    truth = torch.log_softmax(logits, -1)[range(len(prompt) - 1), prompt[1:]].numpy()
    np.testing.assert_allclose(first, truth, atol=1e-3)
    plain = real.text(prompt, max_tokens=4)
    for i in range(3):
        scores, cached = by_prompt_logprobs(real, prompt)
        np.testing.assert_allclose(scores, first, atol=1e-4)
        assert cached == 0
        real.text(prompt[:48] + ids_of(12, 100 + i, 300, 40000), max_tokens=2)
    np.testing.assert_allclose(by_echo(real, prompt), first, atol=1e-4)
    assert real.text(prompt, max_tokens=4) == plain


@pytest.mark.parametrize("ask", [by_prompt_logprobs, by_echo, by_streamed_echo])
@pytest.mark.parametrize("length", LENGTHS)
def test_log02_scores_do_not_depend_on_what_was_asked_before(small, cold, ask, length):
    def scores(server, prompt):
        found = ask(server, prompt)
        return found[0] if ask is by_prompt_logprobs else found

    prompt = ids_of(length, 1000 + length)
    truth = scores(cold, prompt)
    assert is_whole(truth, length)
    for i in range(3):
        np.testing.assert_allclose(scores(small, prompt), truth, atol=1e-4)
        small.text(prompt[: length * 2 // 3] + ids_of(9, i), max_tokens=2)
        small.text(prompt, max_tokens=3)


def test_log02_the_next_who_asks_for_no_scores_hits_what_a_scored_prompt_left(small, cold):
    prompt = ids_of(70, 7)
    by_prompt_logprobs(small, prompt)
    answer = small.complete(prompt, max_tokens=8)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    assert answer["choices"][0]["text"] == cold.text(prompt, max_tokens=8)


def test_log02_scored_and_plain_prompts_side_by_side(small, cold):
    prompts = [ids_of(n, 50) for n in (20, 33, 64, 70)]  # each begins as the longer ones do
    truth = [by_prompt_logprobs(cold, p)[0] for p in prompts]
    texts = [cold.text(p, max_tokens=6) for p in prompts]
    calls = [lambda p=p: by_prompt_logprobs(small, p)[0] for p in prompts]
    calls += [lambda p=p: small.text(p, max_tokens=6) for p in prompts]
    for _ in range(2):
        found = together(calls)
        for scores, expected in zip(found[:4], truth, strict=True):
            np.testing.assert_allclose(scores, expected, atol=1e-4)
        assert found[4:] == texts


def test_log02_a_scored_prompt_with_several_answers(small, cold):
    prompt = ids_of(50, 61)
    truth = by_prompt_logprobs(cold, prompt)[0]
    for _ in range(2):
        answer = small.complete(prompt, prompt_logprobs=1, max_tokens=3, n=3, temperature=1, seed=5)
        assert len(answer["choices"]) == 3
        for choice in answer["choices"]:
            lines = choice["prompt_logprobs"]
            found = [line[str(t)]["logprob"] for line, t in zip(lines[1:], prompt[1:], strict=True)]
            np.testing.assert_allclose(found, truth, atol=1e-4)


def test_log02_long_prompts_and_chats_are_scored_too(small, cold):
    prompt = ids_of(900, 5)
    truth = by_prompt_logprobs(cold, prompt)[0]
    small.text(prompt, max_tokens=1)
    np.testing.assert_allclose(by_prompt_logprobs(small, prompt)[0], truth, atol=1e-4)
    for _ in range(2):
        small.chat("one two three four five six seven eight nine ten " * 3, max_tokens=2)
        scored = [
            s.chat("one two three four five six seven eight nine ten " * 3, prompt_logprobs=0, max_tokens=2)
            for s in (small, cold)
        ]
        lines = [[next(iter(x.values()))["logprob"] for x in a["prompt_logprobs"][1:]] for a in scored]
        np.testing.assert_allclose(lines[0], lines[1], atol=1e-4)
        assert len(lines[0]) == scored[0]["usage"]["prompt_tokens"] - 1
