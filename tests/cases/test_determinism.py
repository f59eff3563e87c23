"""A seed decides an answer, whoever runs beside it: SED-01, SED-03.

In float32, and again in bfloat16 on the native kernels, whose sums do not depend on how many rows there are.
"""

from importlib.util import find_spec

import pytest

from tests.support import checkpoints
from tests.support.clients import together
from tests.support.live import live
from tests.support.prompts import prompts

needs_core = pytest.mark.skipif(find_spec("octavo._native") is None, reason="the native core was not built")
SMALL = ["float32", pytest.param("bfloat16", marks=needs_core)]
REAL = ["float32", pytest.param("bfloat16", marks=[needs_core, pytest.mark.slow])]
ASK = {"temperature": 0.8, "max_tokens": 32, "ignore_eos": True}
PROMPT = "The old violin in the attic"


@pytest.fixture(scope="module", params=SMALL)
def dtype(request):
    """What the small model computes in."""
    return request.param


@pytest.fixture(scope="module")
def small(request, dtype):
    """`tiny-llama`."""
    if dtype == "float32":
        yield request.getfixturevalue("tiny")
        return
    with live(checkpoints.tiny_llama(dtype=dtype), dtype=dtype, num_kv_blocks=4096, num_threads=1) as server:
        yield server


@pytest.fixture(scope="module", params=REAL)
def real(request, chat_path):
    """`chat135m`."""
    if request.param == "float32":
        yield request.getfixturevalue("chat135m")
        return
    with live(chat_path, dtype=request.param, max_model_len=2048, num_kv_blocks=1024, num_threads=1) as server:
        yield server


def drawn(server, prompt=PROMPT, seed=42, **body):
    """The text of one drawn answer."""
    more = {} if seed is None else {"seed": seed}
    return server.text(prompt, **{**ASK, **more, **body})


def neighbours(server, seeds, **body):
    """Calls that keep the batch busy."""
    return [
        lambda p=p, s=s: drawn(server, p, s, **{"max_tokens": 40, **body})
        for p, s in zip(prompts(len(seeds)), seeds, strict=True)
    ]


# ---- SED-01 ----------------------------------------------------------------------------------


COMPANY = {
    "seven without a seed": [None] * 7,
    "seven with seeds": list(range(7)),
    "both": [None, 1, None, 42, None, 43, None],
}


def test_sed01_a_seeded_answer_of_the_real_model_is_the_same_in_any_company(real):
    def ask():
        return drawn(real)

    alone = ask()
    found = together([ask, *neighbours(real, COMPANY["both"], max_tokens=16), ask])
    assert (found[0], found[-1]) == (alone, alone)
    assert real.streamed_text(PROMPT, seed=42, **ASK) == alone
    together([lambda p=p: real.text(p, max_tokens=1, temperature=1) for p in prompts(50)])
    assert ask() == alone


@pytest.mark.parametrize("name", COMPANY)
def test_sed01_a_seeded_answer_is_the_same_in_any_company(small, name):
    def ask():
        return drawn(small)

    alone = ask()
    assert together([ask, *neighbours(small, COMPANY[name])])[0] == alone
    assert together([*neighbours(small, COMPANY[name]), ask])[-1] == alone
    assert together([ask, ask]) == [alone, alone]
    assert small.streamed_text(PROMPT, seed=42, **ASK) == alone


def test_sed01_other_seeds_and_no_seed_give_other_answers(real):
    short = {"max_tokens": 4}
    few = prompts(10)
    first, second, none = (
        together([lambda p=p, s=seed: drawn(real, p, s, **short) for p in few]) for seed in (42, 43, None)
    )
    assert first != second
    assert first != none
    assert second != none
    assert len(set(together([lambda s=s: drawn(real, PROMPT, s, **short) for s in range(8)]))) > 1


SERVERS = {
    "as it is": {},
    "one at a time": {"max_num_seqs": 1},
    "prompts in pieces": {"max_num_batched_tokens": 16},
    "no prefix cache": {"enable_prefix_caching": False},
    "two steps in flight": {"async_scheduling": True},
    "preempted": {"num_kv_blocks": 14, "max_model_len": 160, "kv_watermark": 0},
    "another engine seed": {"seed": 99},
    "other blocks": {"block_size": 32},
    "two threads": {"num_threads": 2},
    "all at once": {"num_kv_blocks": 14, "max_model_len": 160, "max_num_batched_tokens": 20, "async_scheduling": True},
}
SEEDS = [0, 1, 42, 43, 2**31, 2**63 - 1, -7, 2**32 + 42]
SAMPLING = {
    "plain": {},
    "nucleus": {"top_p": 0.9, "top_k": 40},
    "hot": {"temperature": 2.0, "min_p": 0.02},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.1},
}


def batch(server):
    """Eight seeds, four ways to draw, all at once."""
    ways = list(SAMPLING.values()) * 2
    return together([lambda s=s, w=w: drawn(server, "A page", s, **w) for s, w in zip(SEEDS, ways, strict=True)])


@pytest.fixture(scope="module")
def one_by_one(dtype):
    """The same eight requests, each alone on a server that was just started."""
    with live(checkpoints.tiny_llama(dtype=dtype), dtype=dtype, num_kv_blocks=256, num_threads=1) as server:
        ways = list(SAMPLING.values()) * 2
        return [drawn(server, "A page", s, **w) for s, w in zip(SEEDS, ways, strict=True)]


@pytest.mark.parametrize("name", SERVERS)
def test_sed01_a_seeded_answer_is_the_same_on_every_server(one_by_one, dtype, name):
    options = {"num_kv_blocks": 256, "num_threads": 1, "dtype": dtype, **SERVERS[name]}
    with live(checkpoints.tiny_llama(dtype=dtype), **options) as server:
        assert batch(server) == one_by_one
        assert together([*neighbours(server, [None] * 6), lambda: batch(server)])[-1] == one_by_one
        if "num_kv_blocks" in SERVERS[name]:
            assert server.metrics()["octavo_preemptions_total"] > 0
    assert len(set(one_by_one)) == len(one_by_one)


def test_sed01_the_seed_counts_in_every_bit(small):
    assert len({drawn(small, "A page", seed, max_tokens=12) for seed in SEEDS}) == len(SEEDS)


def test_sed01_the_number_minus_one_stands_for_no_seed(small):
    found = [drawn(small, "A page", -1, max_tokens=12) for _ in range(4)]
    assert len(set(found)) > 1


def test_sed01_answers_without_a_seed_differ_within_one_batch(small):
    assert len(set(together([lambda: drawn(small, "A page", None)] * 8))) == 8


def test_sed01_a_chat_is_as_repeatable(small):
    def ask():
        return small.chat("Hello", **ASK, seed=11)["choices"][0]["message"]["content"]

    alone = ask()
    assert together([ask, *neighbours(small, [None] * 5), ask]).count(alone) == 2


# ---- SED-03 ----------------------------------------------------------------------------------


def four(server, prompt=PROMPT, n=4, **body):
    """The texts of several answers to one prompt."""
    choices = server.complete(prompt, **{**ASK, "temperature": 1.2, "seed": 1, "n": n, **body})["choices"]
    assert [choice["index"] for choice in choices] == list(range(n))
    return [choice["text"] for choice in choices]


def four_streamed(server, prompt=PROMPT, n=4, **body):
    """The same, put together from a stream."""
    more = {**ASK, "temperature": 1.2, "seed": 1, "n": n, **body}
    texts = [""] * n
    for event in server.events("/v1/completions", prompt=prompt, **more):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


def test_sed03_answers_to_one_seed_differ_and_come_again(real):
    first = four(real, max_tokens=12)
    assert len(set(first)) > 1
    assert four(real, max_tokens=12) == first
    assert four_streamed(real, max_tokens=12) == first
    assert four(real, max_tokens=12, seed=2) != first


def test_sed03_every_answer_is_its_own_and_does_not_depend_on_how_many_there_are(small):
    first = four(small, n=8)
    assert len(set(first)) == 8
    assert four(small, n=8) == first
    assert four_streamed(small, n=8) == first
    assert four(small, n=3) == first[:3]
    assert four(small, n=1) == first[:1]
    assert together([lambda: four(small, n=8), *neighbours(small, [None] * 5)])[0] == first


def test_sed03_the_answers_of_one_seed_are_not_those_of_the_next(small):
    """Choice i of seed s is no choice of seed s + 1: numbers that are added up would collide."""
    every = [text for seed in range(5, 11) for text in four(small, seed=seed)]
    assert len(set(every)) == len(every)


def test_sed03_several_prompts_with_several_answers(small):
    texts = prompts(3)
    whole = four(small, prompt=texts[0]) + four(small, prompt=texts[1]) + four(small, prompt=texts[2])
    choices = small.complete(texts, **{**ASK, "temperature": 1.2, "seed": 1, "n": 4})["choices"]
    assert [c["index"] for c in choices] == list(range(12))
    assert [c["text"] for c in choices] == whole


def test_sed03_without_a_seed_answers_differ_too(small):
    found = [four(small, seed=None), four(small, seed=None)]
    assert len({text for texts in found for text in texts}) == 8


def test_sed03_answers_of_a_chat(small):
    def ask():
        answer = small.chat("Hello", **{**ASK, "temperature": 1.2, "seed": 1, "n": 4})
        return [choice["message"]["content"] for choice in answer["choices"]]

    first = ask()
    assert len(set(first)) == 4
    assert ask() == first


@pytest.mark.parametrize("options", [{"num_kv_blocks": 14, "max_model_len": 160}, {"enable_prefix_caching": False}])
def test_sed03_preempted_answers_and_answers_that_share_no_blocks(small, dtype, options):
    more = {"num_threads": 1, "num_kv_blocks": 256, "dtype": dtype, **options}
    with live(checkpoints.tiny_llama(dtype=dtype), **more) as server:
        assert four(server, n=6) == four(small, n=6)
