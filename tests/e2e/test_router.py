"""Cache events of a real engine, and a router over real engines that chooses by them (SCH-27, PDX-12)."""

import signal
from contextlib import ExitStack, contextmanager

import httpx
import msgspec
import pytest

from octavo.features.router.prompt import Prompt
from octavo.kvcache.published import Mirror, Note
from tests.support import checkpoints
from tests.support.disagg import pair
from tests.support.http_server import wait_until
from tests.support.live import live, spawn
from tests.support.routed import routed

SMALL = {"num_threads": 1, "block_size": 16, "num_kv_blocks": 64, "max_model_len": 256, "kv_events": True}


def ids(start, count):
    """A prompt that shares nothing with those of another start."""
    return [5 + (start * 37 + i * 7) % 90 for i in range(count)]


class Follower:
    """Reads the events of a server as they come.

    Owns: the connection and the mirror.
    """

    def __init__(self, url):
        self.stack = ExitStack()
        self.mirror = Mirror()
        client = self.stack.enter_context(httpx.Client(base_url=url, timeout=30))
        answer = self.stack.enter_context(client.stream("GET", "/v1/kv/events"))
        assert answer.status_code == 200
        self.lines = answer.iter_lines()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stack.close()

    def until(self, condition):
        """Follow until this holds of the mirror."""
        while not condition(self.mirror):
            line = next(self.lines)
            if line.startswith("data: "):
                self.mirror.follow(msgspec.json.decode(line[6:], type=Note))
        return self


def current(url):
    """What is there now, read anew."""
    with Follower(url) as reader:
        while True:
            line = next(reader.lines)
            if line.startswith("data: "):
                note = msgspec.json.decode(line[6:], type=Note)
                reader.mirror.follow(note)
                if note.kind == "current":
                    return reader.mirror


def cached(server, prompt):
    """How many tokens of a prompt the engine finds."""
    usage = server.complete(prompt, max_tokens=1)["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_events_tell_exactly_what_a_returning_prompt_finds():
    with live(checkpoints.tiny_llama(), **SMALL) as server, Follower(server.url) as reader:
        reader.until(lambda m: m.scheme is not None)
        assert (reader.mirror.scheme.hash, reader.mirror.scheme.block_size) == ("sha256", 16)
        first, salted = ids(1, 70), ids(2, 50)
        server.complete(first, max_tokens=8, ignore_eos=True)
        server.complete(salted, max_tokens=1, cache_salt="s")
        wanted = {*Prompt(first).hashes(16), *Prompt(salted, "s").hashes(16)}
        reader.until(lambda m: wanted <= m.hashes())
        assert Prompt(first).held_by(reader.mirror) == 64 and Prompt(salted).held_by(reader.mirror) == 0
        assert Prompt(salted, "s").held_by(reader.mirror) == 48
        assert cached(server, first) == 64
        assert server.http.post("/reset_prefix_cache").json()["success"] is True
        reader.until(lambda m: not len(m))
        assert cached(server, first) == 0


def test_what_is_evicted_is_told_and_a_new_follower_sees_the_same():
    with live(checkpoints.tiny_llama(), **{**SMALL, "num_kv_blocks": 20}) as server, Follower(server.url) as reader:
        prompts = [ids(i, 81) for i in range(8)]  # five blocks each: they do not all fit
        for prompt in prompts:
            server.complete(prompt, max_tokens=1)
        reader.until(lambda m: Prompt(prompts[-1]).held_by(m) == 80 and Prompt(prompts[0]).held_by(m) == 0)
        again = current(server.url)
        assert again.hashes() == reader.mirror.hashes() and 0 < len(again) <= 20
        held = {i: Prompt(p).held_by(again) for i, p in enumerate(prompts)}
        assert held[0] == 0 and held[7] == 80
        assert cached(server, prompts[7]) == 80


def test_events_cross_from_an_engine_in_a_process_of_its_own():
    options = ["--dtype", "float32", "--num-threads", "1", "--block-size", "16", "--num-kv-blocks", "64", "--kv-events"]
    with spawn(str(checkpoints.tiny_llama()), *options) as server:
        prompt = ids(3, 40)
        server.complete(prompt, max_tokens=1)
        assert wait_until(lambda: Prompt(prompt).held_by(current(server.url)) == 32, 10.0)


def test_without_the_option_there_is_nothing_to_follow():
    with live(checkpoints.tiny_llama(), **{**SMALL, "kv_events": False}) as server:
        answer = server.http.get("/v1/kv/events")
        assert answer.status_code == 404 and "--kv-events" in answer.json()["error"]["message"]


@contextmanager
def two_engines(**config):
    model = checkpoints.tiny_llama()
    with live(model, **SMALL) as a, live(model, **SMALL) as b, routed(plain=[a, b], **config) as router:
        assert wait_until(lambda: all(m.tells for m in router.router.fleet.members), 10.0)
        yield router, a, b


def known(router, server):
    """Blocks that the router knows a server to hold."""
    return len(router.router.fleet[server.url.removeprefix("http://")].mirror)


def test_a_returning_prompt_is_routed_to_the_engine_that_holds_it():
    with two_engines() as (router, a, b):
        homes = {}
        for number in range(6):
            prompt = ids(number, 100)
            answer = router.complete(model=a.model, prompt=prompt, max_tokens=2, temperature=0)
            assert answer.status_code == 200, answer.text
            homes[number] = answer.headers["x-octavo-instance"]
            assert wait_until(lambda n=number: known(router, a) + known(router, b) >= 6 * (n + 1), 10.0)
        assert len(set(homes.values())) == 2
        for number in reversed(range(6)):
            answer = router.complete(model=a.model, prompt=ids(number, 100), max_tokens=2, temperature=0)
            assert answer.headers["x-octavo-instance"] == homes[number]
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        assert router.figure("choices_total", leg="whole", reason="held") == 6


def test_a_returning_chat_is_routed_by_the_engines_own_template():
    with two_engines() as (router, a, b):
        said = "tell me of the sea and of the sky and of all that is between the two of them"
        body = {"model": a.model, "messages": [{"role": "user", "content": said}], "max_tokens": 2, "temperature": 0}
        home = router.http.post("/v1/chat/completions", json=body).headers["x-octavo-instance"]
        assert wait_until(lambda: known(router, a) + known(router, b) > 0, 10.0)
        for _ in range(3):
            answer = router.http.post("/v1/chat/completions", json=body)
            assert answer.headers["x-octavo-instance"] == home
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_streams_and_plain_answers_through_the_router_are_the_engines_own():
    with live(checkpoints.tiny_llama(), **SMALL) as server, routed(plain=[server]) as router:
        body = {"model": server.model, "prompt": "hello there", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        direct = server.complete("hello there", max_tokens=12, ignore_eos=True)
        through = router.complete(**body).json()
        assert through["choices"] == direct["choices"]
        events = router.stream(**body)
        assert events[-1] == "[DONE]"
        assert "".join(c["text"] for e in events[:-1] for c in e["choices"]) == direct["choices"][0]["text"]


PROMPT = ids(4, 150)
BODY = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def alone():
    """What one engine says to the prompt."""
    with live(checkpoints.tiny_llama(), **SMALL) as server:
        return server.complete(PROMPT, max_tokens=20, ignore_eos=True)["choices"][0]["text"]


@contextmanager
def handing_over():
    """A router over a producer and a consumer, each a process of its own."""
    with pair() as (first, second), routed(prefill=[first], decode=[second]) as router:
        yield router, first, second


def name(server):
    return server.url.removeprefix("http://")


def kill(server):
    """As the system does when memory runs out."""
    server.process.kill()
    server.process.wait(10)


def test_pdx_12_prefill_and_decode_on_two_engines_give_the_text_of_one(alone):
    with handing_over() as (router, first, second):
        answer = router.complete(model=first.model, **BODY)
        assert answer.headers["x-octavo-prefill-instance"] == name(first)
        assert answer.headers["x-octavo-instance"] == name(second)
        assert answer.json()["choices"][0]["text"] == alone
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens_by_source"]["remote"] >= 128
        events = router.stream(model=first.model, **{**BODY, "cache_salt": "another"})
        assert "".join(c["text"] for e in events[:-1] for c in e["choices"]) == alone and events[-1] == "[DONE]"
        messages = [{"role": "user", "content": "tell me of the sea and the sky " * 10}]
        chat = {"model": first.model, "messages": messages, "max_completion_tokens": 5, "temperature": 0}
        answer = router.http.post("/v1/chat/completions", json=chat)
        assert answer.headers["x-octavo-prefill-instance"] == name(first)
        assert answer.json()["choices"][0]["message"]["content"] is not None
        assert router.figure("fallbacks_total", leg="prefill") == router.figure("fallbacks_total", leg="decode") == 0


def test_pdx_13_the_text_stays_the_same_when_the_producer_is_killed(alone):
    with handing_over() as (router, first, second):
        kill(first)
        answer = router.complete(model=first.model, **BODY)
        assert answer.headers["x-octavo-instance"] == name(second) and answer.json()["choices"][0]["text"] == alone
        assert "x-octavo-prefill-instance" not in answer.headers
        assert router.figure("fallbacks_total", leg="prefill") == 1


@pytest.mark.slow
def test_pdx_13_the_text_stays_the_same_when_the_consumer_is_killed(alone):
    with handing_over() as (router, first, second):
        kill(second)
        answer = router.complete(model=first.model, **BODY)
        assert answer.headers["x-octavo-instance"] == name(first) and answer.json()["choices"][0]["text"] == alone
        assert router.figure("fallbacks_total", leg="decode") == 1


@pytest.mark.slow
def test_pdx_13_a_frozen_consumer_is_left_for_another_server(alone):
    with handing_over() as (router, first, second):
        second.process.send_signal(signal.SIGSTOP)
        try:
            answer = router.complete(model=first.model, **BODY)
        finally:
            second.process.send_signal(signal.SIGCONT)
        assert answer.headers["x-octavo-instance"] == name(first) and answer.json()["choices"][0]["text"] == alone
