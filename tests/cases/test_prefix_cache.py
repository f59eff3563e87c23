"""What was computed once is used again, and gives the same answer: KVC-01, KVC-06."""

import time

import numpy as np
import pytest

from tests.support import checkpoints
from tests.support.clients import Visitor, together
from tests.support.live import live

LENGTHS = [15, 16, 17, 31, 32, 33, 64]
BLOCK = 16


def ids_of(length, seed, low=5, high=500):
    """Token ids that begin differently for each seed."""
    return np.random.default_rng(seed).integers(low, high, length).tolist()


def ask(server, prompt, salt, **body):
    """Token ids, scores, and how many prompt tokens came from the cache."""
    more = {"logprobs": 1, "return_token_ids": True, "ignore_eos": True, "max_tokens": 4, "cache_salt": salt, **body}
    answer = server.complete(prompt, **more)
    (choice,) = answer["choices"]
    scores = choice["logprobs"]["token_logprobs"]
    return choice["token_ids"], scores, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def check(found, cold, cached):
    """The cold run's answer, and as many tokens from the cache as there are full blocks to find."""
    assert found[0] == cold[0]
    np.testing.assert_allclose(found[1], cold[1], atol=2e-4)
    assert found[2] == cached


def full(tokens, block):
    """Tokens of the full blocks among these; the last token of a prompt is always computed."""
    return tokens // block * block


def visit(server, length, block, low, high, salt, max_tokens=4):
    """One prompt three times, then one that goes on, then one that ends in another token."""
    body = {"max_tokens": max_tokens}
    prompt = ids_of(length, length, low, high)
    longer = prompt + ids_of(5, 1000 + length, low, high)
    other = [*prompt[:-1], prompt[-1] - 1]
    cold = [ask(server, p, f"{salt} cold {i}", **body) for i, p in enumerate((prompt, longer, other))]
    assert [c[2] for c in cold] == [0, 0, 0]
    check(ask(server, prompt, salt, **body), cold[0], 0)
    for _ in range(2):
        check(ask(server, prompt, salt, **body), cold[0], full(length - 1, block))
    check(ask(server, longer, salt, **body), cold[1], full(length, block))
    check(ask(server, other, salt, **body), cold[2], full(length - 1, block))


# ---- KVC-01 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
def test_kvc01_a_prompt_that_is_all_cached_gives_the_same_answer(chat135m, length):
    visit(chat135m, length, BLOCK, 300, 40000, f"kvc01 {length}", max_tokens=2)


MODELS = {
    "blocks of 16": (lambda: checkpoints.tiny_llama(), {}),
    "blocks of 8": (lambda: checkpoints.tiny_llama(), {"block_size": 8}),
    "blocks of 64": (lambda: checkpoints.tiny_llama(), {"block_size": 64}),
    "one token at a time": (lambda: checkpoints.tiny_llama(), {"max_num_batched_tokens": 1, "max_num_seqs": 1}),
    "chunks of 24": (lambda: checkpoints.tiny_llama(), {"max_num_batched_tokens": 24}),
    "two steps in flight": (lambda: checkpoints.tiny_llama(), {"async_scheduling": True}),
}


@pytest.fixture(scope="module", params=MODELS)
def small(request):
    path, options = MODELS[request.param]
    options = {"block_size": BLOCK, "num_kv_blocks": 512, **options}
    with live(path(), num_threads=1, **options) as server:
        yield server, options["block_size"]


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, *LENGTHS, 63, 65, 128, 129])
def test_kvc01_every_border_of_every_block_size(small, length):
    server, block = small
    visit(server, length, block, 5, 500, f"border {length}")


@pytest.mark.parametrize("mixed", [False, True])
def test_kvc01_windows(mixed):
    """A window needs only its last blocks; what was found must still give the cold answer."""
    with live(checkpoints.tiny_swa(mixed=mixed), num_threads=1, num_kv_blocks=512) as server:
        for length in (16, 33, 64, 65, 80, 81, 129, 200):
            prompt = ids_of(length, length)
            longer = prompt + ids_of(5, 1)
            for i, each in enumerate((prompt, longer)):
                cold = ask(server, each, f"cold {length} {i}")
                assert cold[2] == 0
                for _ in range(3):
                    found = ask(server, each, f"warm {length}")
                    check(found, cold, found[2])
                assert found[2] == full(len(each) - 1, BLOCK), "the second and third time hit"


def test_kvc01_one_prompt_many_times_at_once(tiny):
    prompt = ids_of(64, 4321)
    cold = ask(tiny, prompt, "many cold")
    for _ in range(2):
        for found in together([lambda: ask(tiny, prompt, "many")] * 12):
            check(found, cold, found[2])
            assert found[2] in (0, 48)


def test_kvc01_answers_are_found_too(tiny):
    """A conversation goes on: the next prompt holds the last prompt and its answer."""
    prompt, cold = ids_of(30, 77), []
    for turn in range(4):
        cold.append(ask(tiny, prompt, f"turn {turn} cold", max_tokens=20))
        found = ask(tiny, prompt, "turns", max_tokens=20)
        known = 0 if turn == 0 else len(prompt) - 1 - 5  # all but the new words and the last answer's last token
        check(found, cold[-1], full(known, BLOCK))
        prompt = [*prompt, *found[0], *ids_of(5, turn)]


def test_kvc01_salts_and_a_reset_keep_answers_apart(tiny):
    prompt = ids_of(40, 8)
    cold = ask(tiny, prompt, "salt one")
    check(ask(tiny, prompt, "salt two"), cold, 0)
    check(ask(tiny, prompt, "salt two"), cold, 32)
    assert tiny.http.post("/reset_prefix_cache").json()["success"] is True
    check(ask(tiny, prompt, "salt two"), cold, 0)


def test_kvc01_blocks_that_were_evicted_are_computed_again():
    with live(checkpoints.tiny_llama(), num_threads=1, num_kv_blocks=12, max_model_len=128) as server:
        prompts = [ids_of(65, i) for i in range(4)]
        cold = [ask(server, p, f"evict cold {i}") for i, p in enumerate(prompts)]
        for _ in range(3):
            for prompt, truth in zip(prompts, cold, strict=True):
                found = ask(server, prompt, "evict")
                check(found, truth, found[2])
        again = ask(server, prompts[-1], "evict")
        check(again, cold[-1], 64)


# ---- KVC-06 ----------------------------------------------------------------------------------


def interrupted(server, prompt, deltas, leave="close", **body):
    """Drop a stream after some events; the ids that came by then."""
    full_body = {"stream": True, "temperature": 0, "ignore_eos": True, "max_tokens": 400, "return_token_ids": True}
    visitor = Visitor(server, "/v1/completions", prompt=prompt, **{**full_body, **body})
    visitor.read_deltas(deltas)
    getattr(visitor, leave)()
    server.wait_metrics(requests_running=0, requests_waiting=0)
    visitor.close()


def cached_of(server, prompt, **body):
    """How much of a prompt is found."""
    usage = server.complete(prompt, max_tokens=1, **body)["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_kvc06_a_conversation_that_was_interrupted_is_still_there(chat135m):
    words = "The lighthouse keeper counts the ships that pass and writes each of their names into a heavy book. " * 32
    messages = [{"role": "user", "content": words}]
    count = chat135m.post("/tokenize", messages=messages).json()["count"]
    assert count >= 600
    reply = ""
    body = {"model": "chat135m", "messages": messages, "stream": True, "max_tokens": 100, "temperature": 0}
    with chat135m.http.stream("POST", "/v1/chat/completions", json={**body, "ignore_eos": True}) as answer:
        for number, line in enumerate(answer.iter_lines()):
            if '"content":"' in line:
                reply += line.split('"content":"')[1].split('"')[0]
            if number > 40:  # an event and a blank line for each token
                break
    chat135m.wait_metrics(requests_running=0)
    assert reply
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Stop. Just say yes."}]
    usage = chat135m.chat(messages, max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= count - 40


@pytest.mark.parametrize("leave", ["close", "reset", "half_close"])
@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=["one step", "two steps"])
def test_kvc06_whatever_way_it_was_interrupted(leave, options):
    with live(checkpoints.tiny_llama(), num_threads=1, num_kv_blocks=256, **options) as server:
        prompt = ids_of(600, 3)
        answer = ask(server, prompt, "none", max_tokens=48)[0]
        interrupted(server, prompt, 40, leave)
        assert cached_of(server, prompt + answer[:20] + ids_of(9, 1)) >= full(600 + 20, BLOCK), "its answer too"


def test_kvc06_a_prompt_that_was_left_half_way_keeps_what_was_computed():
    with live(checkpoints.tiny_llama(), num_threads=1, num_kv_blocks=256, max_num_batched_tokens=16) as server:
        prompt = ids_of(1900, 5)
        visitor = Visitor(server, "/v1/completions", prompt=prompt, max_tokens=5, temperature=0)
        while server.metrics()["octavo_kv_blocks_used"] < 20:
            time.sleep(0.01)
        visitor.close()
        server.wait_metrics(requests_running=0, requests_waiting=0, kv_blocks_used=0)
        assert cached_of(server, prompt) >= 16 * 16


def test_kvc06_a_stop_string_and_a_plain_answer_that_was_left(tiny):
    prompt = ids_of(100, 55)
    text = tiny.text(prompt, max_tokens=60, ignore_eos=True, cache_salt="x")
    stopped = tiny.complete(prompt, max_tokens=400, ignore_eos=True, stop=[text[20:30]])
    assert stopped["choices"][0]["finish_reason"] == "stop"
    tiny.wait_metrics(requests_running=0)
    assert cached_of(tiny, prompt) == 96
    other = ids_of(100, 56)
    visitor = Visitor(tiny, "/v1/completions", prompt=other, max_tokens=1900, temperature=0, ignore_eos=True)
    while tiny.metrics()["octavo_requests_running"] == 0:
        time.sleep(0.01)
    time.sleep(0.1)
    visitor.close()
    tiny.wait_metrics(requests_running=0)
    assert cached_of(tiny, other) == 96


def test_kvc06_what_others_hold_is_not_lost_when_one_leaves(tiny):
    prompt = ids_of(300, 57)
    cold = ask(tiny, prompt, "cold 57", max_tokens=64)
    stayed, _ = together([lambda: ask(tiny, prompt, "57", max_tokens=64), lambda: interrupted(tiny, prompt, 5)])
    check(stayed, cold, stayed[2])
    check(ask(tiny, prompt, "57", max_tokens=64), cold, full(299, BLOCK))
