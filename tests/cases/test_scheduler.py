"""What the scheduler does is nobody's business but its own: SCH-01, SCH-04, SCH-05."""

import contextlib
import json
import statistics
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest

from tests.support import checkpoints
from tests.support.clients import together
from tests.support.live import live
from tests.support.prompts import prompts

BLOCK = 16


def ids_of(length, seed, low=5, high=500):
    """Token ids that begin differently for each seed."""
    return np.random.default_rng(seed).integers(low, high, length).tolist()


def streamed(server, prompt, **body):
    """A streamed answer, put together: its text, ids, scores, reason, and how many tokens the server counted."""
    events = server.events(
        "/v1/completions", prompt=prompt, return_token_ids=True, stream_options={"include_usage": True}, **body
    )
    *chunks, last = events
    choices = [c for e in chunks for c in e["choices"]]
    scores = [c["logprobs"] for c in choices if c["logprobs"]]
    return {
        "text": "".join(c["text"] for c in choices),
        "ids": [t for c in choices for t in c.get("token_ids", ())],
        "scores": [x for s in scores for x in s["token_logprobs"]],
        "reasons": [c["finish_reason"] for c in choices if c["finish_reason"]],
        "counted": last["usage"]["completion_tokens"],
    }


# ---- SCH-01 ----------------------------------------------------------------------------------


def six(length, low, high, stop):
    """Six requests of different kinds with 40-token prompts: greedy, seeded, with scores, with a stop string."""
    body = {"max_tokens": length, "ignore_eos": True, "temperature": 0}
    seeded = {"temperature": 0.9, "top_p": 0.95}
    more = [
        {}, {**seeded, "seed": 7}, {**seeded, "seed": 8}, {"logprobs": 2}, {"stop": [stop]},
        {"presence_penalty": 0.5, "logprobs": 0},
    ]  # fmt: skip
    return [(ids_of(40, i, low, high), {**body, **each}) for i, each in enumerate(more)]


def check_same(found, solo):
    """The same answer, nothing sent twice and nothing lost."""
    for a, b in zip(found, solo, strict=True):
        assert a["text"] == b["text"]
        assert a["ids"] == b["ids"]
        assert a["reasons"] == b["reasons"]
        assert len(a["reasons"]) == 1
        assert a["counted"] == b["counted"]
        assert len(a["ids"]) == a["counted"]
        np.testing.assert_allclose(a["scores"], b["scores"], atol=2e-4)


POOLS = {
    "alone": {},
    "two steps in flight": {"async_scheduling": True},
    "no prefix cache": {"enable_prefix_caching": False},
    "prompts in pieces": {"max_num_batched_tokens": 24},
    "by priority": {"scheduling_policy": "priority"},
    "no watermark": {"kv_watermark": 0, "async_scheduling": True, "max_num_batched_tokens": 24},
}


@pytest.fixture(scope="module")
def solo(tiny):
    """Six requests, one after another, with room for all; the fifth stops at a string in the middle of its answer."""
    plain = streamed(tiny, ids_of(40, 4), max_tokens=160, ignore_eos=True, temperature=0)
    stop = plain["text"][len(plain["text"]) * 2 // 3 :][:6]
    requests = six(160, 5, 500, stop)
    found = [streamed(tiny, prompt, **body) for prompt, body in requests]
    assert found[4]["reasons"] == ["stop"]
    assert 40 < found[4]["counted"] < 160
    assert all(len(f["ids"]) == 160 for i, f in enumerate(found) if i != 4)
    return requests, found


@pytest.mark.parametrize("name", POOLS)
def test_sch01_preempted_requests_give_the_same_answers(solo, name):
    requests, truth = solo
    blocks = int(2.2 * -(-200 // BLOCK))
    options = {"num_threads": 1, "num_kv_blocks": blocks, "max_model_len": 208, "max_num_seqs": 6, **POOLS[name]}
    with live(checkpoints.tiny_llama(), **options) as server:
        more = [{"priority": i % 3} if "priority" in name else {} for i in range(6)]
        for _ in range(2 if name == "alone" else 1):
            check_same(
                together([lambda r=r, m=m: streamed(server, r[0], **r[1], **m) for r, m in zip(requests, more, strict=True)]),
                truth,
            )  # fmt: skip
        metrics = server.metrics()
        assert metrics["octavo_preemptions_total"] > 0
        server.wait_metrics(requests_running=0, requests_waiting=0, kv_blocks_used=0)


@pytest.mark.parametrize("mixed", [False, True])
def test_sch01_models_with_windows_are_preempted_too(mixed):
    path = checkpoints.tiny_swa(mixed=mixed)
    requests = [(ids_of(40, i), {"max_tokens": 120, "ignore_eos": True, "temperature": 0}) for i in range(5)]
    with ExitStack() as stack:
        wide = stack.enter_context(live(path, num_threads=1, num_kv_blocks=512))
        blocks = 60 if mixed else 18
        options = {"num_threads": 1, "num_kv_blocks": blocks, "max_model_len": 176}
        tight = stack.enter_context(live(path, **options))
        truth = [streamed(wide, prompt, **body) for prompt, body in requests]
        check_same(together([lambda r=r: streamed(tight, r[0], **r[1]) for r in requests]), truth)
        assert wide.metrics()["octavo_preemptions_total"] == 0
        assert tight.metrics()["octavo_preemptions_total"] > 0


def test_sch01_scored_prompts_and_several_answers_survive_preemption(tiny):
    def ask(server, i):
        body = {"max_tokens": 60, "n": 2, "temperature": 0.9, "seed": i, "ignore_eos": True, "prompt_logprobs": 0}
        choices = server.complete(ids_of(40, 70 + i), **body)["choices"]
        lines = [[next(iter(line.values()))["logprob"] for line in c["prompt_logprobs"][1:]] for c in choices]
        return [c["text"] for c in choices], lines

    with live(checkpoints.tiny_llama(), num_threads=1, num_kv_blocks=15, max_model_len=112) as server:
        found = together([lambda i=i: ask(server, i) for i in range(4)])
        assert server.metrics()["octavo_preemptions_total"] > 0
    for i, (texts, lines) in enumerate(found):
        expected, scores = ask(tiny, i)
        assert texts == expected
        np.testing.assert_allclose(lines, scores, atol=1e-4)


def test_sch01_the_real_model_is_preempted_without_a_trace(chat135m, chat_path, reference):
    requests = six(12, 300, 40000, "\x00never")
    truth = [streamed(chat135m, prompt, **body) for prompt, body in requests]
    with live(chat_path, num_threads=1, num_kv_blocks=10, max_model_len=80, max_num_seqs=6, kv_watermark=0) as server:
        found = together([lambda r=r: streamed(server, r[0], **r[1]) for r in requests])
        assert server.metrics()["octavo_preemptions_total"] > 0
    for (prompt, body), a, b in zip(requests, found, truth, strict=True):
        assert a["reasons"] == b["reasons"] == ["length"]
        assert a["counted"] == len(a["ids"]) == 12
        if body["temperature"] == 0 and "presence_penalty" not in body:
            reference.check_same(prompt, b["ids"], a["ids"])
            if a["ids"] == b["ids"]:
                np.testing.assert_allclose(a["scores"], b["scores"], atol=1e-3)
        else:
            assert a["ids"] == b["ids"]


@pytest.mark.skip(reason="waits for structured output: a request with a JSON schema is preempted")
def test_sch01_structured_output_survives_preemption():
    raise AssertionError


# ---- SCH-04 ----------------------------------------------------------------------------------


class Watched:
    """A stream whose events are noted with their moments.

    Owns: the moments, and the thread that reads.
    """

    def __init__(self, server, prompt, **body):
        self.times = []
        self.text = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(server, prompt, body), daemon=True)
        self._thread.start()

    def _read(self, server, prompt, body):
        full = {"model": server.model, "prompt": prompt, "stream": True, "temperature": 0, "ignore_eos": True, **body}
        full["return_token_ids"] = True  # an event for each token, also for a part of a character
        with server.http.stream("POST", "/v1/completions", json=full) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.times.append(time.monotonic())
                    self.text += json.loads(line[6:])["choices"][0]["text"]
                if self._stop.is_set():
                    return

    def wait(self, events=1, timeout_s=120):
        """Until this many events have come."""
        end = time.monotonic() + timeout_s
        while len(self.times) < events:
            assert time.monotonic() < end
            time.sleep(0.01)
        return self.times[events - 1]

    def join(self):
        """Until the stream has ended."""
        self._thread.join(120)
        assert not self._thread.is_alive()

    def stop(self):
        """Leave."""
        self._stop.set()
        self.join()


def rush(server, long_prompt, short_prompt, warm, budget):
    """Four streams, then a very long prompt, then a short one; what the streams saw of it."""
    streams = [Watched(server, text, max_tokens=1500) for text in prompts(4)]
    for stream in streams:
        stream.wait(warm)
    before = [b - a for s in streams for a, b in zip(s.times, s.times[1:], strict=False)]
    start = time.monotonic()
    long = Watched(server, long_prompt, max_tokens=4)
    while server.metrics()["octavo_requests_running"] < 5:
        assert time.monotonic() - start < 60
        time.sleep(0.02)  # the engine runs in this process too
    short = Watched(server, short_prompt, max_tokens=4)
    long_first, short_first = long.wait(), short.wait()
    for stream in streams:
        stream.stop()
    long.join()
    during = [[t for t in s.times if start <= t <= long_first] for s in streams]
    gaps = [b - a for times in during for a, b in zip([start, *times], [*times, long_first], strict=True)]
    chunks = len(long_prompt) // budget
    for times in during:
        assert len(times) >= chunks // 2, "the streams go on while the long prompt is computed"
    allowed = max(3 * statistics.median(before) + 0.2, (long_first - start) / 3)  # a stall would last all of it
    assert max(gaps) <= allowed, "no stream waits for the long prompt"
    assert short_first < long_first + 2 * statistics.median(gaps), "the short prompt does not wait for the long one"
    return long.text


def rush_without_a_stall(server, prompts, short_prompt, warm, budget):
    """The first of three tries that goes well: a scheduler that stalls does so each time, a busy neighbour does not."""
    for prompt in prompts[:-1]:
        with contextlib.suppress(AssertionError):
            return prompt, rush(server, prompt, short_prompt, warm, budget)
    return prompts[-1], rush(server, prompts[-1], short_prompt, warm, budget)


def test_sch04_a_long_prompt_stalls_nobody_and_is_answered_the_same(tiny):
    long = [ids_of(1900, seed) for seed in (99, 96, 95)]
    with live(checkpoints.tiny_llama(), num_threads=1, num_kv_blocks=1024, max_num_batched_tokens=64) as server:
        prompt, text = rush_without_a_stall(server, long, ids_of(10, 98), warm=30, budget=64)
    assert text == tiny.text(prompt, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize(("size", "warm"), [(500, 8), pytest.param(1900, 30, marks=pytest.mark.slow)])
def test_sch04_the_real_model_does_not_stall_either(chat135m, chat_path, size, warm):
    long = [ids_of(size, seed, 300, 40000) for seed in (97, 95, 94)]
    with live(chat_path, num_threads=1, num_kv_blocks=512, max_model_len=2048, max_num_batched_tokens=64) as server:
        prompt, text = rush_without_a_stall(server, long, ids_of(10, 96, 300, 40000), warm=warm, budget=64)
    assert text == chat135m.text(prompt, max_tokens=4, ignore_eos=True)


def test_sch04_several_long_prompts_share_what_there_is():
    """Two long prompts and a short one behind them: the short one is through long before them."""
    with live(checkpoints.tiny_llama(), num_threads=1, num_kv_blocks=1024, max_num_batched_tokens=64) as server:
        stream = Watched(server, ids_of(8, 1), max_tokens=1500)
        stream.wait(5)
        longs = [Watched(server, ids_of(1900, 90 + i), max_tokens=1) for i in range(2)]
        while server.metrics()["octavo_requests_running"] < 3:
            time.sleep(0.01)
        short = Watched(server, ids_of(10, 93), max_tokens=1)
        first = short.wait()
        assert all(first < long.wait() for long in longs)
        stream.stop()


# ---- SCH-05 ----------------------------------------------------------------------------------

BORDERS = [15, 16, 17, 31, 32, 33, 63, 64, 65]


def one_token(server, length, scored):
    """The one token after a prompt of this length, and the prompt's scores."""
    body = {"max_tokens": 1, "logprobs": 0, "return_token_ids": True, "ignore_eos": True}
    if scored:
        body["prompt_logprobs"] = 0
    answer = server.complete(ids_of(length, 300 + length), **body)
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == 1
    assert answer["usage"]["completion_tokens"] == 1
    assert choice["finish_reason"] == "length"
    lines = choice["prompt_logprobs"][1:] if scored else []
    assert len(lines) == (length - 1 if scored else 0)
    scores = [next(iter(line.values()))["logprob"] for line in lines]
    return choice["token_ids"], scores + choice["logprobs"]["token_logprobs"]


CHUNKS = {
    "32 in blocks of 16": {"max_num_batched_tokens": 32},
    "16, as long as a block": {"max_num_batched_tokens": 16},
    "17": {"max_num_batched_tokens": 17},
    "1 token": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "32, two steps in flight": {"max_num_batched_tokens": 32, "async_scheduling": True},
    "32 without a prefix cache": {"max_num_batched_tokens": 32, "enable_prefix_caching": False},
    "a threshold": {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 16},
}


@pytest.mark.parametrize("name", CHUNKS)
def test_sch05_one_token_after_a_prompt_that_ends_at_a_border(tiny, name):
    with live(checkpoints.tiny_llama(), num_threads=1, num_kv_blocks=256, **CHUNKS[name]) as server:
        for scored in (False, True):
            whole = [one_token(tiny, n, scored) for n in BORDERS]
            for found in (
                [one_token(server, n, scored) for n in BORDERS],
                together([lambda n=n, s=scored: one_token(server, n, s) for n in BORDERS], timeout_s=30),
            ):
                for (a, b), (c, d) in zip(found, whole, strict=True):
                    assert a == c
                    np.testing.assert_allclose(b, d, atol=1e-4)
        server.wait_metrics(requests_running=0, requests_waiting=0, kv_blocks_used=0)


@pytest.mark.parametrize("room", [0, 1])
def test_sch05_a_prompt_that_fills_the_context_or_the_memory(tiny, room):
    """47 tokens and one more in a context of 48, with exactly as many blocks as that takes."""
    with live(checkpoints.tiny_llama(), num_threads=1, max_model_len=48, num_kv_blocks=4 + room,
              max_num_batched_tokens=32) as server:  # fmt: skip
        found = together([lambda s=s: one_token(server, 47, s) for s in (False, True, False)], timeout_s=30)
    assert [ids for ids, _ in found] == [one_token(tiny, 47, False)[0]] * 3
